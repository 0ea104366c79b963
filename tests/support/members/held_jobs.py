"""Jobs that are held in each phase of the protocol, in which a test may cause a fault."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from support.clusters.fault_world import Cast
from support.members.scripted_member import ANSWER, OFFER, READY, SETTLE

from shoal_proto.v1 import membership_pb2 as pb

NUM_ABORTS = 5


@dataclass(frozen=True, kw_only=True)
class Held:
    """A held job: its release, and the expected result."""

    cast: Cast
    release: Callable[[], object] = lambda: None
    """Releases the members."""
    trains: tuple[str, ...]
    """Members that train in the end."""
    unbroken: int = 0
    """Generation that trains; nothing may break it."""
    decided: int = 0
    """Generation that is durable, and must be the one that runs in the end."""

    def goes_on(self) -> None:
        """Release the job; fail unless all train in the end and received the same outcomes."""
        with self.cast.explained():
            self._goes_on()

    def _goes_on(self) -> None:
        self.release()
        generations = {self.cast[name].await_training_with(*self.trains) for name in self.trains}
        (generation,) = generations
        assert self.decided in (0, generation)
        self.cast.await_running(generation)
        for member in self.cast.members:
            assert self.unbroken not in member.breaks()
        self.cast.check_agreement()


def in_collect(cast: Cast) -> Held:
    """Hold in COLLECT: one of two desired members is present."""
    cast.joins("a").await_notice("admitted")
    return Held(cast=cast, release=lambda: cast.joins("b"), trains=("a", "b"))


def in_prepare(cast: Cast) -> Held:
    """Hold in PREPARE: one of two has not answered; nothing ran before."""
    cast.joins("a")
    b = cast.joins("b", ANSWER)
    b.await_withheld(ANSWER)
    return Held(cast=cast, release=lambda: b.release(ANSWER), trains=("a", "b"))


def in_prepare_of_a_change(cast: Cast) -> Held:
    """Hold a planned change in PREPARE: two train, and a member that joins has not answered."""
    cast.training("a", "b")
    c = cast.joins("c", ANSWER)
    c.await_withheld(ANSWER)
    release = lambda: c.release(ANSWER)  # noqa: E731
    return Held(cast=cast, release=release, trains=("a", "b", "c"), unbroken=1)


def in_committed(cast: Cast) -> Held:
    """Hold the first generation in COMMITTED: one of two members is not ready."""
    a = cast.joins("a")
    b = cast.joins("b", READY)
    b.await_withheld(READY)
    a.await_notice("outcome")
    return Held(cast=cast, release=lambda: b.release(READY), trains=("a", "b"), decided=1)


def before_the_boundary(cast: Cast) -> Held:
    """Hold a committed change: one of the training members has not offered a step to stop at."""
    _, b = cast.training("a", "b")
    b.withhold(OFFER)
    c = cast.joins("c")
    b.await_withheld(OFFER)
    c.await_notice("outcome")
    return Held(
        cast=cast,
        release=lambda: b.release(OFFER),
        trains=("a", "b", "c"),
        unbroken=1,
        decided=2,
    )


def after_the_boundary(cast: Cast) -> Held:
    """Hold a committed change: the old generation has stopped, and the new member is not ready."""
    a, b = cast.training("a", "b")
    c = cast.joins("c", READY)
    for member in (a, b):
        member.await_notice("stop_at")
    c.await_withheld(READY)
    return Held(cast=cast, release=lambda: c.release(READY), trains=("a", "b", "c"), decided=2)


def running(cast: Cast) -> Held:
    """Hold nothing: two members train."""
    cast.training("a", "b")
    return Held(cast=cast, trains=("a", "b"), unbroken=1, decided=1)


def broken(cast: Cast) -> Held:
    """Hold a break: one of three has left, and only one of the others has reported its step."""
    a, b, c = cast.training("a", "b", "c")
    b.withhold(SETTLE)
    c.leave()
    a.await_notice("break")
    b.await_withheld(SETTLE)
    return Held(cast=cast, release=lambda: b.release(SETTLE), trains=("a", "b"))


def in_prepare_after_a_loss(cast: Cast) -> Held:
    """Hold in PREPARE after a loss: one of three has left; of the others, one has not answered."""
    _, b, c = cast.training("a", "b", "c")
    b.withhold(ANSWER)
    c.leave()
    b.await_withheld(ANSWER)
    return Held(cast=cast, release=lambda: b.release(ANSWER), trains=("a", "b"))


def in_aborted(cast: Cast) -> Held:
    """Hold nothing: several attempts failed, and the job backs off before the next."""
    cast.joins("a")
    b = cast.joins("b", num_wrong_digests=NUM_ABORTS)
    b.await_notice("outcome", lambda notice: notice.outcome.roster.generation == NUM_ABORTS)
    assert all(r.verdict == pb.VERDICT_ABORTED for r in b.outcomes())
    return Held(cast=cast, trains=("a", "b"))


def between_the_boundarys_notices(cast: Cast) -> Held:
    """Hold an agreed boundary: one of the training members was not notified of it."""
    a, b = cast.training("a", "b")
    a.withhold(OFFER)
    cast.joins("c")
    a.await_withheld(OFFER)
    b.await_call(OFFER)
    b.drop_notices("stop_at")
    a.release(OFFER)
    a.await_notice("stop_at")
    b.await_dropped("stop_at")
    return Held(cast=cast, release=b.attend_again, trains=("a", "b", "c"), decided=2)


HELD: Mapping[str, Callable[[Cast], Held]] = {
    build.__name__: build
    for build in (
        in_collect,
        in_prepare,
        in_prepare_of_a_change,
        in_committed,
        before_the_boundary,
        after_the_boundary,
        running,
        broken,
        in_prepare_after_a_loss,
        between_the_boundarys_notices,
        # At the end: this job is not held, and makes its next attempt soon.
        in_aborted,
    )
}

__all__ = ["HELD", "Held"]
