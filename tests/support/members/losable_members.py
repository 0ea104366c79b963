"""Jobs that are held in each phase by a member in a separate process, which a test may kill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from support.clusters.fault_world import Cast
from support.members.scripted_member import (
    ANSWER,
    OFFER,
    READY,
    SETTLE,
    MemberProcess,
    ScriptedMember,
)

from shoal_proto.v1 import membership_pb2 as pb

VICTIM = "victim"
NUM_ABORTS = 5


@dataclass(frozen=True, kw_only=True)
class Losable:
    """A job, and the member that is lost."""

    cast: Cast
    victim: MemberProcess
    trains: tuple[str, ...]
    """Members that train in the end."""
    comes: tuple[str, ...] = ()
    """Members that join once the victim is lost."""
    release: Callable[[], object] = lambda: None
    above: int = 0
    """Generation after which the one in which they train must come."""
    desired: int = 2
    unbroken: int = 0
    """Generation that trains without the victim; nothing may break it."""

    def goes_on(self) -> None:
        """Fail unless the others train in the end, and received the same outcomes."""
        with self.cast.explained():
            self._goes_on()

    def _goes_on(self) -> None:
        self.release()
        for name in self.comes:
            self.cast.joins(name, desired=self.desired)
        (generation,) = {
            self.cast[name].await_training_with(*self.trains, above=self.above)
            for name in self.trains
        }
        self.cast.await_running(generation)
        for member in self.cast.members:
            assert self.unbroken not in member.breaks()
        self.cast.check_agreement()
        # A victim that was in no generation may be lost only after the others train.
        self.cast.await_loss_of(VICTIM)
        self.cast.check_fenced(self.victim.token(generation))


def in_collect(cast: Cast) -> Losable:
    """Make a job whose victim has proposed, while a third member is awaited."""
    cast.joins("a", desired=3)
    victim = cast.process(VICTIM, desired=3)
    victim.await_notice("admitted")
    return Losable(cast=cast, victim=victim, comes=("b", "c"), trains=("a", "b", "c"), desired=3)


def in_prepare(cast: Cast) -> Losable:
    """Make a job whose victim has not answered in the first PREPARE."""
    cast.joins("a")
    victim = cast.process(VICTIM, ANSWER)
    victim.await_withheld(ANSWER)
    return Losable(cast=cast, victim=victim, comes=("b",), trains=("a", "b"))


def newcomer_in_prepare(cast: Cast) -> Losable:
    """Make a job whose victim is to join two training members, and has not answered."""
    cast.training("a", "b")
    victim = cast.process(VICTIM, ANSWER)
    victim.await_withheld(ANSWER)
    return Losable(cast=cast, victim=victim, comes=("c",), trains=("a", "b", "c"), unbroken=1)


def trainer_in_prepare(cast: Cast) -> Losable:
    """Make a job whose victim trains, while a member that joins has not answered."""
    cast.joins("a")
    victim = cast.process(VICTIM)
    cast["a"].await_training_with("a", VICTIM)
    c = cast.joins("c", ANSWER)
    c.await_withheld(ANSWER)
    return Losable(cast=cast, victim=victim, release=lambda: c.release(ANSWER), trains=("a", "c"))


def in_committed(cast: Cast) -> Losable:
    """Make a job whose victim is not ready in the first generation."""
    cast.joins("a")
    victim = cast.process(VICTIM, READY)
    victim.await_withheld(READY)
    return Losable(cast=cast, victim=victim, comes=("b",), trains=("a", "b"))


def before_the_boundary(cast: Cast) -> Losable:
    """Make a job whose victim trains, and has offered no step to stop at for a join."""
    cast.joins("a")
    victim = cast.process(VICTIM, OFFER)
    cast["a"].await_training_with("a", VICTIM)
    cast.joins("c")
    victim.await_withheld(OFFER)
    return Losable(cast=cast, victim=victim, trains=("a", "c"))


def newcomer_before_the_boundary(cast: Cast) -> Losable:
    """Make a job whose victim is to join two training members, one of which has offered no step to
    stop at."""
    a, b = cast.training("a", "b")
    b.withhold(OFFER)
    victim = cast.process(VICTIM)
    victim.await_notice("outcome")
    b.await_withheld(OFFER)
    return Losable(
        cast=cast,
        victim=victim,
        release=lambda: (_aborted(a, 2), b.release(OFFER)),
        trains=("a", "b"),
        unbroken=1,
    )


def after_the_boundary(cast: Cast) -> Losable:
    """Make a job whose old generation has stopped for the victim, which is not ready."""
    a, b = cast.training("a", "b")
    victim = cast.process(VICTIM, READY)
    victim.await_withheld(READY)
    for member in (a, b):
        member.await_notice("stop_at")
    return Losable(cast=cast, victim=victim, trains=("a", "b"), above=2)


def running(cast: Cast) -> Losable:
    """Make a job whose victim trains with two others."""
    options = {"desired": 3}
    victim = cast.process(VICTIM, **options)
    for name in ("a", "b"):
        cast.joins(name, **options)
    victim.await_notice("running")
    return Losable(cast=cast, victim=victim, trains=("a", "b"))


def broken(cast: Cast) -> Losable:
    """Make a job that another member has left, after which the victim has not reported its step."""
    victim = cast.process(VICTIM, SETTLE, desired=3)
    a, c = (cast.joins(name, desired=3) for name in ("a", "c"))
    a.await_training_with("a", "c", VICTIM)
    c.leave()
    victim.await_withheld(SETTLE)
    return Losable(cast=cast, victim=victim, trains=("a",))


def in_aborted(cast: Cast) -> Losable:
    """Make a job that backs off, as several attempts failed by the victim's fault."""
    a = cast.joins("a")
    victim = cast.process(VICTIM, num_wrong_digests=100)
    _aborted(a, NUM_ABORTS)
    return Losable(cast=cast, victim=victim, comes=("b",), trains=("a", "b"))


def _aborted(member: ScriptedMember, generation: int) -> None:
    def wanted(notice: pb.Notice) -> bool:
        record = notice.outcome
        return (record.roster.generation, record.verdict) == (generation, pb.VERDICT_ABORTED)

    member.await_notice("outcome", wanted)


LOSABLE: Mapping[str, Callable[[Cast], Losable]] = {
    build.__name__: build
    for build in (
        in_collect,
        in_prepare,
        newcomer_in_prepare,
        trainer_in_prepare,
        in_committed,
        before_the_boundary,
        newcomer_before_the_boundary,
        after_the_boundary,
        running,
        broken,
        in_aborted,
    )
}

__all__ = ["LOSABLE", "Losable"]
