"""Requests to drain, made by a script or a signal and seen by the script, in one process."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.training import rank_bodies

import shoal
from shoal.membership.draining import DrainSignal
from shoal_client.host.stop_orders import SAME_ORDER_S
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import StateLost


def train(session: shoal.Session) -> Iterator[int]:
    """Yield after each step of a training that does not end by itself."""
    replica, _ = session.distribute(*rank_bodies.model_and_optimizer())
    for batch in session.batches(rank_bodies.data(), global_batch_size=10, epochs=10_000):
        with session.step() as step:
            session.backward(rank_bodies.loss_of(replica(batch.inputs), batch.targets))
        assert step.committed
        yield session.step_number


def test_a_script_that_learns_of_a_spot_notice_drains_itself(cluster: LocalCluster) -> None:
    """The script gets Drained with the reason, between two steps, and may catch it."""
    with (
        pytest.raises(shoal.Drained, match="spot notice") as raised,
        shoal.join("drains-itself", coordinator=cluster.coordinator) as session,
    ):
        for step in train(session):
            if step == 3:
                session.drain("spot notice")
    assert raised.value.code == 143
    assert isinstance(raised.value, SystemExit)
    # The job is not complete and its state is lost: a new start takes --fresh.
    with (
        pytest.raises(StateLost, match="--fresh"),
        shoal.join("drains-itself", coordinator=cluster.coordinator) as session,
    ):
        next(train(session))


def test_sigterm_is_a_request_to_drain_only_during_the_session(cluster: LocalCluster) -> None:
    """SIGTERM ends the process again after the session."""
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


TRAINS = """
import ctypes, os, signal, sys, time
import torch
import shoal
from shoal_client.host.stop_orders import SAME_ORDER_S

def show(text):
    print(text, flush=True)

def own(number, frame):
    show("the script's own handler")
    sys.exit(7)

def idle():  # a signal just before one long sleep would be handled after it
    for _ in range(3000):
        time.sleep(0.01)

def hang():  # in C, where no handler of Python's runs
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    show("hangs")
    while True:
        libc.pthread_mutex_lock(mutex)

before = signal.getsignal(signal.SIGTERM)
model = torch.nn.Linear(4, 1)
try:
    with shoal.join("alone") as session:
        model, optimizer = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in session.batches(torch.ones(8, 4), global_batch_size=4, epochs=10**9):
            with session.step():
                session.backward(model(batch.inputs).sum())
            if batch.step == 3:
                show("trains")
finally:
    UNWINDS
"""


@contextmanager
def training(unwinds: str = "pass") -> Iterator["subprocess.Popen[str]"]:
    """Start a script that trains alone, with the line `unwinds` after its session."""
    text = TRAINS.replace("UNWINDS", unwinds)
    environment = {key: value for key, value in os.environ.items() if "SHOAL_" not in key}
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", wanted: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if wanted in line:
            return
    raise AssertionError(f"{wanted!r} did not come in {seen}")


def told_twice(process: "subprocess.Popen[str]", between: str = "") -> int:
    """Send two SIGTERMs, the second one after the script has printed `between`; return the exit
    code."""
    read_until(process, "trains")
    process.send_signal(signal.SIGTERM)
    if between:
        read_until(process, between)
    else:
        time.sleep(0.02)  # apart, as Slurm sends them: two signals that are pending at once are one
    process.send_signal(signal.SIGTERM)
    return process.wait(30.0)


@pytest.mark.long
def test_two_sigterms_at_once_are_one_request() -> None:
    """Slurm and systemd signal the worker, and so does its launcher."""
    with training() as process:
        assert told_twice(process) == 143


@pytest.mark.long
@pytest.mark.parametrize(
    "unwinds",
    [
        "",
        pytest.param("signal.signal(signal.SIGTERM, before); ", marks=pytest.mark.long),
        pytest.param("signal.signal(signal.SIGTERM, signal.SIG_DFL); ", marks=pytest.mark.long),
        "assert signal.signal(signal.SIGTERM, own) != own; ",
    ],
    ids=["as-the-session-left-it", "put-back", "by-default", "own"],
)
def test_a_second_sigterm_does_not_end_a_script_that_unwinds(unwinds: str) -> None:
    """The script may save its work, in whatever line the second signal arrives and whatever handler
    it has put back."""
    with training(unwinds=f"{unwinds}show('unwinds'); time.sleep(1.0)") as process:
        assert told_twice(process, "unwinds") == 143


@pytest.mark.long
def test_a_handler_that_is_put_back_soon_after_a_sigterm_gets_the_next_one() -> None:
    """A script that handles the signal itself after its session goes on doing so."""
    later = "signal.signal(signal.SIGTERM, own); time.sleep(SAME_ORDER_S + 0.2); show('later')"
    with training(unwinds=f"{later}; idle()") as process:
        assert told_twice(process, "later") == 7


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("hangs", ["hang()", "time.sleep(30)"], ids=["in-c", "in-python"])
def test_a_second_sigterm_that_comes_later_ends_the_process(hangs: str) -> None:
    """A process that cannot be drained can still be stopped, wherever its main thread hangs."""
    with training(unwinds=f"show('late'); {hangs}") as process:
        read_until(process, "trains")
        process.send_signal(signal.SIGTERM)
        read_until(process, "late")
        time.sleep(SAME_ORDER_S + 0.2)  # the test needs a signal that comes so late
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == -signal.SIGTERM


@pytest.mark.long
def test_a_member_that_waits_for_a_coordinator_leaves_on_sigterm() -> None:
    """No coordinator answers. A second signal does not kill the process while it unwinds."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        script = (
            "import shoal, time\n"
            "try:\n"
            f"    with shoal.join('away', coordinator='{address}'):\n"
            "        pass\n"
            "finally:\n"
            "    print('unwinds', flush=True); time.sleep(1)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "SHOAL_ADMISSION_S": "600"},
        ) as process:
            try:
                read_until(process, "coordinator_disconnected")
                process.send_signal(signal.SIGTERM)
                read_until(process, "unwinds")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30.0) == 143
            finally:
                process.kill()


def test_a_script_that_handles_sigterm_itself_keeps_its_handler() -> None:
    """Holds for a handler set before the session, and for one set during it."""

    def own(number: int, frame: object) -> None:
        """Handler of the script."""

    drain_signal = DrainSignal(lambda reason: None)
    signal.signal(signal.SIGTERM, own)
    drain_signal.install()
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    drain_signal.install()
    signal.signal(signal.SIGTERM, own)
    drain_signal.restore()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_handler_of_an_earlier_session_requests_no_drain() -> None:
    """Lightning's Trainer puts back the handler that it found, possibly after the session has
    ended."""
    asked: list[str] = []
    over, next_one = DrainSignal(asked.append), DrainSignal(asked.append)
    over.install()
    left_over = signal.getsignal(signal.SIGTERM)
    over.restore()
    signal.signal(signal.SIGTERM, left_over)
    next_one.install()
    assert signal.getsignal(signal.SIGTERM) != left_over
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
    """A forked process does not take the signal as a request to drain: a pool that sent it would
    wait for that process for ever."""
    drain_signal, trainer, set_mask = (
        DrainSignal(lambda reason: None),
        os.getpid(),
        signal.pthread_sigmask,
    )
    drain_signal.install()

    def late(how: int, mask: Any) -> Any:
        if os.getpid() != trainer:
            os.kill(os.getpid(), signal.SIGTERM)
        return set_mask(how, mask)

    monkeypatch.setattr(signal, "pthread_sigmask", late)
    forked = os.fork()
    if not forked:
        os._exit(7)
    monkeypatch.undo()
    _, status = os.waitpid(forked, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    drain_signal.restore()


def exit_7(number: int, frame: object) -> None:
    """Handler that ends the process at once."""
    os._exit(7)


@pytest.mark.parametrize(
    ("own", "ends"), [(None, -signal.SIGTERM), (exit_7, 7)], ids=["default", "own"]
)
def test_a_process_forked_soon_after_a_sigterm_is_ended_by_the_next_one(
    own: Any, ends: int
) -> None:
    """The forked process got no earlier signal, so the next one is not a repetition: also not for a
    handler that this process sets itself."""
    trainer = os.fork()
    if not trainer:
        # A process of its own: the requested drain must not last into the next test.
        DrainSignal(lambda reason: None).install()
        signal.raise_signal(signal.SIGTERM)
        forked = os.fork()
        if not forked:
            if own is not None:
                signal.signal(signal.SIGTERM, own)
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(forked, 0)
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    _, status = os.waitpid(trainer, 0)
    assert os.waitstatus_to_exitcode(status) == ends % 256


def test_the_kind_of_device_is_a_field_that_all_members_share(cluster: LocalCluster) -> None:
    """The kind of device is among the fields that all members share, and that validators see."""
    fields: dict[str, str] = {}

    def look(roster: shoal.Roster) -> None:
        fields.update(roster.fields)

    with shoal.join("fields", coordinator=cluster.coordinator, validators=[look]) as session:
        next(train(session))
    assert (fields["device"], fields["strategy"], fields["validators"]) == ("cpu", "ddp", "look")
    assert "nccl" not in fields
