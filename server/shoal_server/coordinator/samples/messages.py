"""What the messages of the Samples service mean to a ledger."""

from collections.abc import Sequence

from shoal_proto.errors import InvalidSpec, MalformedMessage, Overloaded
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import samples_pb2
from shoal_server.core.samples.ledger import MAX_HELD_RANGES, Ledger
from shoal_server.core.samples.requests import Request, SampleRange, StaleRequest, TooManyRanges

RETRY_AFTER_S = 0.1
MAX_RANGES = 1024


def check(request: samples_pb2.LeaseRequest) -> None:
    """Raise MalformedMessage or InvalidSpec for what no ledger could answer."""
    if request.sequence < 1 or not request.token.member_id:
        raise MalformedMessage(
            "a lease request without member or sequence number",
            seen=f"member_id {request.token.member_id!r}, sequence {request.sequence}",
            expected="the member's token, and a number that rises from 1",
        )
    if request.dataset_size < 1 or request.num_epochs < 1:
        raise InvalidSpec(
            "there is nothing to lease",
            seen=f"dataset_size {request.dataset_size}, num_epochs {request.num_epochs}",
            expected="at least 1 each",
        )
    if max(len(request.completed), len(request.held)) > MAX_RANGES:
        raise MalformedMessage(
            "too many ranges in one request",
            seen=f"{len(request.completed)} completed, {len(request.held)} held",
            expected=f"at most {MAX_RANGES} each",
        )


def ranges_of(ranges: Sequence[samples_pb2.SampleRange]) -> tuple[SampleRange, ...]:
    """The ranges as the core takes them."""
    return tuple(SampleRange(r.epoch, r.start, r.stop) for r in ranges)


def answer(ledger: Ledger, request: samples_pb2.LeaseRequest) -> samples_pb2.LeaseReply:
    """Let the ledger answer. Raises MalformedMessage for an overtaken request, Overloaded."""
    try:
        found = ledger.answer(
            Request(
                member_id=request.token.member_id,
                # The books go into snapshots, which others may read.
                incarnation=public_id(request.token.incarnation),
                sequence=request.sequence,
                completed=ranges_of(request.completed),
                held=ranges_of(request.held),
                num_samples=request.num_samples,
            )
        )
    except StaleRequest as error:
        raise MalformedMessage(
            "the lease request was overtaken by a later one",
            seen=f"sequence {error.sequence}",
            expected=f"{error.newest} again, or a higher one",
        ) from error
    except TooManyRanges as error:
        raise Overloaded(
            f"{request.token.member_id} holds too many ranges to get another",
            seen=f"{len(request.held)} ranges",
            expected=f"fewer than {MAX_HELD_RANGES}",
            fix="Report what was completed before you lease more.",
        ) from error
    reply = samples_pb2.LeaseReply(exhausted=found.exhausted)
    if found.range is not None:
        r = found.range
        reply.range.CopyFrom(samples_pb2.SampleRange(epoch=r.epoch, start=r.start, stop=r.stop))
    elif not found.exhausted:
        reply.retry_after_s = RETRY_AFTER_S
    return reply
