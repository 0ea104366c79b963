"""The wish to drain as a script states and sees it, in one process."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.training import rank_bodies

import shoal
from shoal.membership.draining import DrainSignal
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import StateLost


@pytest.fixture(autouse=True)
def _sigterm_as_by_default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def train(session: shoal.Session) -> Iterator[int]:
    """Yields after each step of a training that does not end by itself."""
    replica, _ = session.distribute(*rank_bodies.model_and_optimizer())
    for batch in session.batches(rank_bodies.data(), global_batch_size=10, epochs=10_000):
        with session.step() as step:
            session.backward(rank_bodies.loss_of(replica(batch.inputs), batch.targets))
        assert step.committed
        yield session.step_number


def test_a_script_that_learns_of_a_spot_notice_drains_itself(cluster: LocalCluster) -> None:
    """It sees Drained with the reason, between two steps, and may catch it."""
    with (
        pytest.raises(shoal.Drained, match="spot notice") as raised,
        shoal.join("drains-itself", coordinator=cluster.coordinator) as session,
    ):
        for step in train(session):
            if step == 3:
                session.drain("spot notice")
    assert raised.value.code == 143
    assert isinstance(raised.value, SystemExit)
    # The job was not completed by that, and its state is gone: nobody begins it anew unasked.
    with (
        pytest.raises(StateLost, match="--fresh"),
        shoal.join("drains-itself", coordinator=cluster.coordinator) as session,
    ):
        next(train(session))


def test_sigterm_is_taken_as_a_wish_only_while_the_session_lasts(cluster: LocalCluster) -> None:
    """Afterwards it ends the process again."""
    with (
        pytest.raises(shoal.Drained, match="SIGTERM"),
        shoal.join("drains-by-signal", coordinator=cluster.coordinator) as session,
    ):
        for step in train(session):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with shoal.join("drains-by-signal", coordinator=cluster.coordinator):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_sigterm_ends_the_process() -> None:
    """One that cannot be drained can still be stopped."""
    asked: list[str] = []
    drain_signal = DrainSignal(asked.append)
    drain_signal.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    drain_signal.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_script_that_handles_sigterm_itself_keeps_its_handler() -> None:
    """Whether it was there first or came later."""

    def own(number: int, frame: object) -> None:
        """The script's."""

    drain_signal = DrainSignal(lambda reason: None)
    signal.signal(signal.SIGTERM, own)
    drain_signal.install()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    drain_signal.install()
    signal.signal(signal.SIGTERM, own)
    drain_signal.restore()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_of_a_session_that_is_over_asks_nobody_to_drain() -> None:
    """Lightning's Trainer puts back what it found, if need be after the session has ended."""
    asked: list[str] = []
    over, next_one = DrainSignal(asked.append), DrainSignal(asked.append)
    over.install()
    left_over = signal.getsignal(signal.SIGTERM)
    over.restore()
    signal.signal(signal.SIGTERM, left_over)
    next_one.install()
    assert signal.getsignal(signal.SIGTERM) == next_one._handle
    next_one.restore()
    signal.signal(signal.SIGTERM, left_over)
    ended = os.fork()
    if not ended:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(ended, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert not asked


def test_a_forked_process_is_ended_by_a_signal_that_came_as_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool that sent it would wait for ever for one that took it for a wish to drain."""
    drain_signal, trainer, set_handler = (
        DrainSignal(lambda reason: None),
        os.getpid(),
        signal.signal,
    )
    drain_signal.install()

    def late(number: int, handler: Any) -> Any:
        if os.getpid() != trainer:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", late)
    forked = os.fork()
    if not forked:
        os._exit(7)
    monkeypatch.undo()
    _, status = os.waitpid(forked, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    drain_signal.restore()


def test_members_agree_on_the_kind_of_their_devices(cluster: LocalCluster) -> None:
    """It is among the fields that all of them must have in common, as validators see them."""
    fields: dict[str, str] = {}

    def look(roster: shoal.Roster) -> None:
        fields.update(roster.fields)

    with shoal.join("fields", coordinator=cluster.coordinator, validators=[look]) as session:
        next(train(session))
    assert (fields["device"], fields["strategy"], fields["validators"]) == ("cpu", "ddp", "look")
    assert "nccl" not in fields
