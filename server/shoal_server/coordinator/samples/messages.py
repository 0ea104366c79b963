"""Conversion of the Samples service's messages to and from the ledger's types."""

from collections.abc import Sequence

from shoal_proto.errors import InvalidSpec, MalformedMessage, Overloaded
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import samples_pb2
from shoal_server.core.samples.ledger import MAX_HELD_RANGES, SampleLedger
from shoal_server.core.samples.requests import (
    LedgerRange,
    SampleRequest,
    StaleRequest,
    TooManyRanges,
)

RETRY_AFTER_S = 0.1
MAX_RANGES = 1024
MAX_SHOWN_HOLDERS = 4


def check(request: samples_pb2.LeaseRequest) -> None:
    """Raise MalformedMessage or InvalidSpec for a request that no ledger could answer."""
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
    fields = ("completed", "completed_before", "held", "given_back")
    counts = {name: len(getattr(request, name)) for name in fields}
    if max(counts.values()) > MAX_RANGES:
        raise MalformedMessage(
            "too many ranges in one request",
            seen=", ".join(f"{number} {name}" for name, number in counts.items()),
            expected=f"at most {MAX_RANGES} each",
        )
    if request.reserve_samples > request.dataset_size * request.num_epochs:
        raise InvalidSpec(
            "the reserve is larger than the job has samples",
            seen=f"reserve_samples {request.reserve_samples}",
            expected=f"at most {request.dataset_size * request.num_epochs}",
        )


def ranges_of(ranges: Sequence[samples_pb2.SampleRange]) -> tuple[LedgerRange, ...]:
    """Convert ranges to the core's type."""
    return tuple(LedgerRange(r.epoch, r.start, r.stop) for r in ranges)


def answer(
    ledger: SampleLedger, request: samples_pb2.LeaseRequest, num_members: int
) -> tuple[samples_pb2.LeaseReply, bool]:
    """Return the ledger's reply, and True if the ledger has changed. Raises MalformedMessage for an
    overtaken request, and Overloaded if the member holds too many ranges."""
    try:
        decision = ledger.answer(
            SampleRequest(
                member_id=request.token.member_id,
                # The incarnation is a secret, and snapshots contain the ledger.
                incarnation=public_id(request.token.incarnation),
                sequence=request.sequence,
                completed=ranges_of(request.completed),
                held=ranges_of(request.held),
                num_samples=request.num_samples,
                reserve=request.reserve_samples,
                step_samples=max(request.step_samples, 1),
                given_back=ranges_of(request.given_back),
                completed_before=ranges_of(request.completed_before),
                begun=request.begun_samples,
                begins_per_s=request.begins_samples_per_s,
            ),
            num_members,
        )
    except StaleRequest as error:
        raise MalformedMessage(
            "the lease request was overtaken by a later one",
            seen=f"sequence {error.sequence}",
            expected=f"sequence {error.newest} again, or a higher one",
        ) from error
    except TooManyRanges as error:
        raise Overloaded(
            f"{request.token.member_id} holds too many ranges to get another",
            seen=f"{len(request.held)} ranges",
            expected=f"fewer than {MAX_HELD_RANGES}",
            fix="Report what was completed before you lease more.",
        ) from error
    reply = samples_pb2.LeaseReply(
        exhausted=decision.exhausted,
        reserve_max_samples=decision.reserve_max,
        not_held=map(_message, decision.not_held),
    )
    if decision.range is not None:
        reply.range.CopyFrom(_message(decision.range))
    elif not decision.exhausted:
        reply.retry_after_s = RETRY_AFTER_S
    return reply, decision.is_news


def _message(r: LedgerRange) -> samples_pb2.SampleRange:
    return samples_pb2.SampleRange(epoch=r.epoch, start=r.start, stop=r.stop)


def wait_in_words(ledger: SampleLedger) -> str:
    """Describe why a member waits for samples, with the members that hold them."""
    held = {name: num for name, num in ledger.held_samples.items() if num}
    others = sorted(held, key=lambda name: (-held[name], name))
    holders = ", ".join(f"{held[name]} by {name}" for name in others[:MAX_SHOWN_HOLDERS])
    more = len(others) - MAX_SHOWN_HOLDERS
    holders += f" and by {more} more" if more > 0 else ""
    return f"samples: all available ones are leased ({holders})" if holders else "samples"
