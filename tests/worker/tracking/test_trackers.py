"""`session.log`: each value of each step once, in the real trackers, over kills and joins."""

import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from structlog.testing import capture_logs
from support.members.elastic_schedule import Schedule, lose_all
from support.members.logging_members import BEHIND_EACH, Logging, tracker, train
from support.oracles.tracker_files import READ, Logged
from support.processes.ranks import Ranks
from support.processes.served_process import awaited
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.tracking.job_log import JobLog
from shoal.tracking.tensorboard import _written
from shoal.tracking.tracker import OpenRun, Run, RunInUse, Tracker, WriteProgress
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1.membership_pb2 import (
    STATE_ACTION_INITIAL,
    STATE_ACTION_KEEP,
    GenerationRecord,
    Roster,
    RosterEntry,
)

TRACKERS = pytest.mark.parametrize(
    "name",
    ["tensorboard", *(pytest.param(n, marks=pytest.mark.long) for n in ("wandb", "mlflow"))],
)


@pytest.fixture(autouse=True)
def _file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow requires this for runs in files."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def logging(cluster: LocalCluster, tmp_path: Path, **changes: Any) -> Logging:
    return Logging(
        coordinator=cluster.coordinator,
        job=f"logging-{secrets.token_hex(4)}",
        member_id="",
        directory=str(tmp_path),
        **{"desired_members": 3, "batch_size": 24, **changes},
    )


def check(logged: Logged, num_steps: int) -> None:
    """Check that each step is there once, with its own value."""
    every = range(1, num_steps + 1)
    assert logged["in"] == [(step, float(step)) for step in every]
    assert logged["behind"] == [(step, float(step)) for step in every]
    tenths = range(BEHIND_EACH, num_steps + 1, BEHIND_EACH)
    assert logged["seldom"] == [(step, step / BEHIND_EACH) for step in tenths]


def only(runs: dict[str, Logged]) -> Logged:
    """Return the values of the only run."""
    (logged,) = runs.values()
    return logged


@pytest.mark.long
@TRACKERS
def test_each_step_is_logged_once_after_kills_joins_and_a_drain(
    cluster: LocalCluster, tmp_path: Path, name: str
) -> None:
    run = logging(cluster, tmp_path, trackers=(name,))
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=train)
        schedule.start(3)
        schedule.alive.sort(key=lambda rank: rank is not schedule.all[0])
        schedule.kill()
        schedule.join()
        schedule.kill()
        schedule.join()
        schedule.drain()
        num_steps = schedule.finish()["step"]
    check(only(READ[name](tmp_path, run.job)), num_steps)


@pytest.mark.long
@TRACKERS
def test_steps_that_are_taken_again_from_a_checkpoint_are_not_written_again(
    cluster: LocalCluster, tmp_path: Path, name: str
) -> None:
    """Members are all killed, and the job continues in the same run of the tracker."""
    directory = tmp_path / "checkpoints"
    run = logging(cluster, tmp_path, trackers=(name,), checkpoints=str(directory))
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=6, body=train)
        schedule.start(3)
        lose_all(schedule, directory, 2)
        again = Schedule(ranks, run, tmp_path, seed=7, body=train)
        again.start(3)
        num_steps = again.finish()["step"]
    logged = only(READ[name](tmp_path, run.job))
    # Values of the last fraction of a second are lost with the members if no checkpoint has them;
    # their steps are taken again.
    check(logged, num_steps)


def alone(directory: Path, name: str, num_steps: int) -> None:
    """Train as `python train.py` does, without a cluster."""
    model, optimizer = build("sgd", "layers")
    with shoal.join("alone", trackers=[tracker(name, directory)]) as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(data(), global_batch_size=24):
            with session.step():
                loss = cross_entropy(model(batch.inputs), batch.targets)
                session.backward(loss)
                session.log({"loss": loss, "lr": 0.1})
            if session.step_number == num_steps:
                session.stop("enough")


@TRACKERS
def test_a_second_run_from_step_0_is_a_run_of_its_own(tmp_path: Path, name: str) -> None:
    alone(tmp_path, name, 3)
    alone(tmp_path, name, 2)
    first, second = READ[name](tmp_path, "alone").values()
    assert [step for step, _ in first["loss"]] == [1, 2, 3]
    assert second["lr"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))]
    assert first["loss"][0] == second["loss"][0]


def test_logged_values_are_on_the_page_and_in_metrics(cluster: LocalCluster) -> None:
    """The page shows the newest value by name, and a chart over steps; NaN is shown as NaN."""
    model, optimizer = build("sgd", "layers")
    job = f"shown-{secrets.token_hex(4)}"
    with shoal.join(job, coordinator=cluster.coordinator) as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(data(), global_batch_size=24, epochs=1):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                session.log({"accuracy": 0.5, "broken": float("nan")})
        last = session.step_number
    with httpx.Client(base_url=cluster.http_url, trust_env=False) as http:
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            detail = http.get(f"/api/v1/jobs/{job}").json()
            course = detail["course"]
            if course["logged"].get("accuracy") == [last, 0.5]:
                break
        assert course["logged"] == {"accuracy": [last, 0.5], "broken": [last, "NaN"]}
        assert course["num_steps"] == last
        assert course["progress"] == 1.0
        assert detail["run"]["command"]
        assert (detail["hyperparameters"]["global_batch"], detail["hyperparameters"]["lr"]) == (
            "24",
            str(optimizer.param_groups[0]["lr"]),
        )
        (accuracy, _) = http.get(f"/api/v1/jobs/{job}/history").json()["logged"]
        assert accuracy["steps"][-1] <= last == accuracy["newest_step"]
        metrics = http.get("/metrics").text
        assert f'shoal_job_logged_value{{job="{job}",name="accuracy"}} 0.5' in metrics


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"picture": torch.zeros(3)}, "picture cannot be logged"),
        ({"text": "hello"}, "text cannot be logged"),
        ({"nothing": None}, "nothing cannot be logged"),
        ({"a loss": 1.0}, "cannot be logged under this name"),
        ({"step": 1.0}, "cannot be logged under this name; saw step"),
        ({7: 1.0}, "cannot be logged under this name"),
        ([("loss", 1.0)], "takes numbers by name"),
    ],
)
def test_logged_values_that_are_no_numbers_by_name_are_refused(values: Any, message: str) -> None:
    model, optimizer = build("sgd", "layers")
    with shoal.join("refused") as session:
        session.distribute(model, optimizer)
        with pytest.raises(InvalidSpec, match=message):
            session.log(values)


def test_a_missing_package_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal comes at once, where the script makes the tracker."""
    monkeypatch.setattr("shoal.tracking.tracker.find_spec", lambda name: None)
    for make, extra in (
        (lambda: shoal.TensorBoard("runs"), "tensorboard"),
        (lambda: shoal.WandB("project"), "wandb"),
        (lambda: shoal.MLflow("file:mlruns"), "mlflow"),
    ):
        with pytest.raises(InvalidSpec, match=rf"pip install 'shoal\[{extra}\]'"):
            make()


def test_a_location_that_mlflow_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has MLflow's text, and comes where the script makes the tracker."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with pytest.raises(InvalidSpec, match="MLFLOW_ALLOW_FILE_STORE"):
        shoal.MLflow("file:mlruns")


@pytest.mark.long
def test_a_tracking_server_of_databricks_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a run makes no lock file. Without a profile, the call fails without a connection."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Exception, match=r"(?i)databricks"):
        shoal.MLflow("databricks").open(Run(job="job", begun_unix_s=0.0))
    assert not list(tmp_path.iterdir())


def test_a_name_that_mlflow_cannot_store_beside_another_stops_no_other(tmp_path: Path) -> None:
    """Regression: no later value of any name was written."""
    mlflow = shoal.MLflow(f"file:{tmp_path}/mlruns")
    for begun_unix_s, step in ((1000.0, 1), (None, 2)):
        opened = mlflow.open(Run(job="job", begun_unix_s=begun_unix_s))
        with capture_logs() as logs:
            for name in ("loss", "loss/val", "accuracy", "loss/val"):
                opened.write(step, {name: 1.0}, 1000.0 + step)
        opened.close()
        assert [(line["event"], line["name"]) for line in logs] == [
            ("logged_values_left_out", "loss/val")
        ]
    assert opened.written == WriteProgress(step=1, names=frozenset({"loss", "accuracy"}))


def test_a_run_begins_with_its_job_even_if_its_first_member_logs_nothing(tmp_path: Path) -> None:
    """Regression: a later member wrote into the run of the job before."""
    tracker = shoal.TensorBoard(tmp_path)
    before = tracker.open(Run(job="job", begun_unix_s=1000.0))
    before.write(100, {"loss": 1.0}, 1000.0)
    before.close()
    first = RosterEntry(member_id="a", state=STATE_ACTION_INITIAL)
    begun = GenerationRecord(roster=Roster(entries=[first]), decided_unix_s=2000.0)
    job_log = JobLog("job", "a", [tracker])
    job_log.record_generation(begun, synchronous=True, step=0)
    job_log.close()
    later = JobLog("job", "b", [tracker])
    joined = RosterEntry(member_id="b", state=STATE_ACTION_KEEP)
    later.record_generation(
        GenerationRecord(roster=Roster(entries=[joined])), synchronous=True, step=3
    )
    later.log({"loss": 2.0}, step=3, in_step=False)
    later.close()
    runs = {path.name: _written(path) for path in (tmp_path / "job").glob("run-*")}
    assert {name: each.step for name, each in runs.items()} == {
        "run-0000001000000": 100,
        "run-0000002000000": 3,
    }


class BusyTracker(Tracker):
    """A run that another process holds until `free` is set, and that stores up to step 2."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.free = threading.Event()
        self.steps: list[int] = []

    def open(self, run: Run) -> OpenRun:
        if not self.free.is_set():
            self.num_refused += 1
            raise RunInUse
        return BusyRun(self.steps)


class BusyRun(OpenRun):
    written = WriteProgress(step=2, names=frozenset({"loss"}))

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._steps.append(step)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_steps_dropped_while_another_process_holds_the_run_are_lost_unless_it_stored_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.tracking.job_log.MAX_KEPT", 3)
    tracker = BusyTracker()
    job_log = JobLog("job", "a", [tracker])
    roster = Roster(entries=[RosterEntry(member_id="a")])
    job_log.record_generation(GenerationRecord(roster=roster), synchronous=True, step=1)
    job_log.log({"loss": 1.0}, step=1, in_step=False)
    awaited(lambda: tracker.num_refused > 1, 20.0, "the run is in use")
    for step in range(2, 9):
        job_log.log({"loss": 1.0}, step=step, in_step=False)
    with capture_logs() as logs:
        tracker.free.set()
        job_log.flush(20.0)
        job_log.close()
    assert tracker.steps == [6, 7, 8]
    lost = [line["num_steps"] for line in logs if line["event"] == "logged_values_lost"]
    assert lost == [3]


class SlowTracker(BusyTracker):
    """A run of which each write waits for `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = threading.Event()

    def open(self, run: Run) -> OpenRun:
        return SlowRun(self)


class SlowRun(BusyRun):
    written = WriteProgress()

    def __init__(self, tracker: SlowTracker) -> None:
        super().__init__(tracker.steps)
        self._tracker = tracker

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        self._tracker.writes.set()
        assert self._tracker.free.wait(20.0)
        super().write(step, values, unix_s)


def test_steps_that_a_slow_tracker_has_no_time_for_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: they were missing without a word."""
    monkeypatch.setattr("shoal.tracking.job_log.MAX_KEPT", 3)
    tracker = SlowTracker()
    job_log = JobLog("job", "a", [tracker])
    roster = Roster(entries=[RosterEntry(member_id="a")])
    job_log.record_generation(GenerationRecord(roster=roster), synchronous=True, step=1)
    job_log.log({"loss": 1.0}, step=1, in_step=False)
    assert tracker.writes.wait(20.0)
    for step in range(2, 9):
        job_log.log({"loss": 1.0}, step=step, in_step=False)
    with capture_logs() as logs:
        tracker.free.set()
        job_log.close()
    assert tracker.steps == [1, 6, 7, 8]
    lost = [line["num_steps"] for line in logs if line["event"] == "logged_values_lost"]
    assert lost == [4]


def test_a_later_rank_0_of_an_asynchronous_job_continues_after_the_last_step() -> None:
    """Regression: its values were dropped until it had taken more steps than the former rank 0."""
    tracker = BusyTracker()
    tracker.free.set()
    job_log = JobLog("job", "b", [tracker])
    former, own = RosterEntry(member_id="a"), RosterEntry(member_id="b", rank=1)
    joined = GenerationRecord(roster=Roster(entries=[former, own]))
    job_log.record_generation(joined, synchronous=False, step=0)
    job_log.log({"loss": 1.0}, step=1, in_step=False)
    alone = GenerationRecord(roster=Roster(entries=[RosterEntry(member_id="b")]))
    job_log.record_generation(alone, synchronous=False, step=1)
    with capture_logs() as logs:
        for step in (2, 3, 4):
            job_log.log({"loss": 1.0}, step=step, in_step=False)
        job_log.flush(20.0)
        job_log.log({"loss": 1.0}, step=5, in_step=False)
        job_log.close()
    assert tracker.steps == [3, 4, 5, 6]
    assert [line for line in logs if line["event"] == "logged_values_lost"] == []


def test_something_else_than_a_tracker_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="trackers contains an object that is not a tracker"):
        shoal.join("refused", trackers=["tensorboard"])  # type: ignore[list-item]
