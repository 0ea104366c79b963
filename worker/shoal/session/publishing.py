"""Series of versions that the members of a session publish together."""

from collections.abc import Callable, Mapping
from types import TracebackType

from torch import Tensor, nn

from shoal.membership.generation import Generation
from shoal.session.elastic_controller import ElasticController
from shoal.weights.pieces import HeldWeights
from shoal.weights.series import (
    Contributor,
    PendingPublication,
    Publications,
    PublisherRank,
    SeriesOptions,
    held_state,
)
from shoal.weights.subscription import version_lookup
from shoal_client.weights.publisher import SeriesPublisher
from shoal_proto.errors import InvalidSpec, MemberDrained
from shoal_proto.names import check_name
from shoal_proto.v1 import weights_pb2

AWAY_S = 15.0
"""Time without a coordinator after which training no longer waits for earlier publications. A
successor mostly leads by then: the leader's lease is 5 s. Less than `collective_s`, since other
members wait in a collective meanwhile."""


class SessionSeries:
    """Series made by `session.series`. All members make the same calls on it."""

    def __init__(
        self,
        controller: ElasticController,
        fields: dict[str, str],
        name: str,
        options: SeriesOptions,
        check_closed: Callable[[str], None],
    ) -> None:
        """`fields`: the proposal's fields; `check_closed(call)` raises InvalidSpec in a step."""
        check_name(name, "series")
        member = controller.member
        if not member.coordinators:
            raise InvalidSpec(
                "a series needs a cluster: parameter servers hold its versions",
                seen="a session that trains alone",
                expected="shoal run SCRIPT, or shoal.join(coordinator='host:port')",
            )
        self.name = f"{member.spec.job}/{name}"
        self._controller = controller
        self._fields = fields
        self._check_closed = check_closed
        self._generation: Generation | None = None
        self.options = options
        look = version_lookup(member.coordinators, self.name)
        self._publications = Publications(self.name, self._connect, options, look)

    def publish(
        self,
        model: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        metadata: Mapping[str, object] | None = None,
    ) -> PendingPublication:
        """Publish the model of the last committed step as the next version of the series.

        All members must call it at the same point between two steps:

            if step.committed and batch.step % 10 == 0:
                policy.publish(metadata={"loss": loss.item()})

        Returns once this member's part of the model is copied; waits while two publications are in
        progress (one, if a single member publishes). The copy is sent and committed in the
        background: see `PendingPublication.wait`. If a member is lost before its part is on the
        servers, the publication fails with PublicationAbandoned. If no coordinator is reached for
        `AWAY_S`, the call does not wait: the publications in progress fail instead.

        `model`: another module, or tensors by name, which must be the same on all members; each
        publishes its own slice of a DTensor. Under an asynchronous strategy, only the member with
        rank 0 publishes its values. A series with `tables` publishes the servers' values, from one
        cut that includes all pushes acknowledged before the call; buffers and untrained parameters
        are those of rank 0.

        Raises InvalidSpec within a step, for a model that cannot be published, for `model` if the
        series has tables, and for metadata above 4096 bytes; Overloaded if there is no memory for
        the copy; and the error that ended the membership.
        """
        self._check_closed("series.publish")
        strategy = self._controller.strategy
        if self.options.tables and strategy.synchronous:
            strategy.own_weights()  # Raises the strategy's refusal, on all members.
        generation = self._generation = self._controller.present_or_next_generation(self._fields)
        rank, world_size = generation.rank, generation.world_size
        if not strategy.synchronous:
            if rank:
                return _empty_ticket(strategy.step)
            rank, world_size = 0, 1
        held: HeldWeights = strategy.own_weights() if self.options.tables else strategy.weights()
        if model is not None:
            _check_without_tables(self.name, has_tables=self.options.tables)
            held = held_state(model, step=held.step, rank=rank, world_size=world_size)
        publisher = PublisherRank(number=generation.number, rank=rank, world_size=world_size)
        membership = self._controller.membership

        def is_over() -> bool:
            failure = membership.failure
            # The last publications of a drained member are to be committed, like its last step.
            has_failed = failure is not None and not isinstance(failure, MemberDrained)
            return has_failed or membership.is_broken(generation.number)

        return self._publications.publish(
            held, publisher, metadata, is_over=is_over, is_away=lambda: membership.away_s > AWAY_S
        )

    def _connect(self, publisher: PublisherRank) -> Contributor:
        generation = self._generation
        assert generation is not None, "a publication belongs to a generation"
        return SeriesPublisher(
            self._controller.member.coordinators,
            self.name,
            lambda: weights_pb2.Publisher(token=generation.token),
            rank=publisher.rank,
            world=publisher.world_size,
            options=self.options.to_message(),
        )

    def end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the series at the end of the session's block, as an `__exit__`. Waits up to 30 s
        for each publication in progress, unless an error other than SystemExit ends the block."""
        self._publications.close(waits=error is None or isinstance(error, SystemExit))


def _check_without_tables(series: str, *, has_tables: bool) -> None:
    if has_tables:
        raise InvalidSpec(
            f"series {series} has tables: its versions are the values of the parameter servers",
            seen="publish(model=...)",
            expected="publish()",
            fix="Publish another model under a series of its own, without tables.",
        )


def _empty_ticket(step: int) -> PendingPublication:
    ticket = PendingPublication(0, step)
    ticket.nothing_to_publish()
    return ticket
