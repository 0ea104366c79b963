"""`shoal demo` trains, survives its kills, counts correctly, and leaves no process."""

import json
import signal
from pathlib import Path

import pytest
from support.processes.commands import Shoal, finish, read_until

EPOCHS = "40"
"""Half of the default: enough for 95 %."""


@pytest.mark.long
def test_the_demo_trains_and_loses_no_sample(shoal_command: Shoal, tmp_path: Path) -> None:
    """Jobs with either kind of strategy reach 95 %, and continue within 2 s of a kill; no process
    is left."""
    figures = tmp_path / "figures.json"
    code, output = finish(shoal_command.start("demo", "--epochs", EPOCHS, "--json", str(figures)))
    assert code == 0, output
    assert shoal_command.processes() == {}
    rows = {row["strategy"]: row for row in json.loads(figures.read_text())}
    assert list(rows) == ["async-sgd", "ddp"]
    for row in rows.values():
        assert row["test_accuracy"] >= 0.95
        assert row["samples_lost"] == 0
        assert row["steps"] > 0
        assert row["samples_per_s"] > 0
        assert row["recovery_s"] < 2.0
        assert f"{row['test_accuracy']:.3f}" in output
    # Deterministic data order: samples in progress at the kill are trained once, by the survivors.
    assert rows["ddp"]["samples_repeated"] == 0
    # The most that the killed worker may have begun since its last report.
    begun_since = 2 * rows["async-sgd"]["samples_per_s"]
    assert rows["async-sgd"]["samples_repeated"] <= 3 * 96 + begun_since


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("moment", ["starting etcd", "status page", "async-sgd: SIGKILL to"])
def test_ctrl_c_leaves_no_process(shoal_command: Shoal, moment: str) -> None:
    """SIGINT in each of three stages gives exit code 130; no process is left at the command's
    end."""
    process = shoal_command.start("demo")
    lines = read_until(process, moment)
    process.send_signal(signal.SIGINT)
    code, output = finish(process, lines)
    assert code == 130, output
    assert shoal_command.processes() == {}


@pytest.mark.long
def test_a_killed_demo_leaves_no_process(shoal_command: Shoal) -> None:
    """SIGKILL of the demo ends etcd, coordinator, servers and workers, too."""
    process = shoal_command.start("demo")
    read_until(process, "status page")
    assert len(shoal_command.processes()) >= 5
    process.kill()
    process.wait()
    assert shoal_command.await_none(10.0) == {}


def test_a_bad_json_path_is_refused_before_anything_starts(shoal_command: Shoal) -> None:
    code, output = finish(shoal_command.start("demo", "--json", "/no/such/directory/file"))
    assert code == 2
    assert "/no/such/directory/file" in output
