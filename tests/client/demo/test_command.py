"""The directory of a demo that was given no directory: its logs are kept only after a failure."""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from shoal_client.demo import command
from shoal_client.demo.command import DemoConfig, demo
from shoal_client.demo.plan import MIN_ACCURACY, DemoPlan, Outcome
from shoal_client.local.access import LocalTls
from shoal_client.local.directory import KEPT_LOGS
from shoal_proto.errors import Unavailable


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the handlers that the demo replaces."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def outcome(accuracy: float) -> Outcome:
    return Outcome(
        strategy="ddp",
        test_accuracy=accuracy,
        steps=1,
        samples_per_s=1.0,
        recovery_s=0.0,
        pause_s=0.0,
        samples_lost=0,
        samples_repeated=0,
        replacement_steps=0,
    )


@pytest.mark.parametrize(
    ("accuracy", "left"),
    [
        (MIN_ACCURACY, {}),
        (MIN_ACCURACY - 0.01, {}),
        (MIN_ACCURACY, {7: "shoal coordinator"}),
    ],
)
def test_logs_are_kept_after_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accuracy: float,
    left: dict[int, str],
) -> None:
    """A low accuracy and processes left behind are failures, although nothing raised. Keys are
    never kept."""

    def train(
        plans: Sequence[DemoPlan], directory: Path, console: Console, tls: LocalTls | None
    ) -> Sequence[Outcome]:
        assert directory.name.startswith("shoal-demo-")
        for name in ("etcd.log", "ca.key"):
            (directory / name).write_text(name)
        return [outcome(accuracy)]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command, "sweep", lambda limit_s: left)
    monkeypatch.setattr(command, "train", train)
    has_failed = accuracy < MIN_ACCURACY or bool(left)
    assert demo(DemoConfig()) == has_failed
    kept = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == ({"etcd.log", KEPT_LOGS} if has_failed else set())
    assert len(list(tmp_path.iterdir())) == has_failed
    assert ("the logs are in" in capsys.readouterr().err) == has_failed


def test_a_demo_that_fails_without_logs_names_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo fails before its first part starts, for example without etcd."""

    def train(
        plans: Sequence[DemoPlan], directory: Path, console: Console, tls: LocalTls | None
    ) -> Sequence[Outcome]:
        raise Unavailable("etcd was not found")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "adopt_orphans", lambda: None)
    monkeypatch.setattr(command, "sweep", lambda limit_s: {})
    monkeypatch.setattr(command, "train", train)
    with pytest.raises(Unavailable):
        demo(DemoConfig())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""
