"""Tracker for MLflow, on a server or in a folder of files."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import structlog

from shoal.tracking.tracker import Lock, OpenRun, Run, Tracker, WriteProgress, require, run_name
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

JOB, RUN = "shoal.job", "shoal.run"
"""Names of a run's tags: for its job, and for its name within the job."""
AT_ONCE = 500


@dataclass(frozen=True)
class MLflow(Tracker):
    """Stores values as metrics of an MLflow run, with the tags `shoal.job` and `shoal.run`.

    A member that writes to a folder or SQLite file holds the job's lock in that folder; a server
    has no such lock. Raises InvalidSpec if the package mlflow is not installed, or does not accept
    `uri`.
    """

    uri: str
    """Address of the tracking server, or `file:` or `sqlite:` and a path that all hosts see."""
    experiment: str = "shoal"
    """Name of the experiment, which is created if it does not exist."""

    def __post_init__(self) -> None:
        require("mlflow", tracker="MLflow", extra="mlflow")
        self._client()

    def _client(self) -> Any:
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra, and slow
        from mlflow.exceptions import MlflowException  # noqa: PLC0415

        try:
            return MlflowClient(tracking_uri=self.uri)
        except MlflowException as error:
            raise InvalidSpec(
                "MLflow does not accept this location for runs",
                seen=f"{self.uri}: {error}",
                expected="the URL of a tracking server, or the store in which MLflow keeps runs",
            ) from error

    def open(self, run: Run) -> OpenRun:
        with ExitStack() as held:
            folder = _folder(self.uri)
            if folder is not None:
                held.enter_context(Lock(folder / f".shoal-{run.job}.lock"))
            client = self._client()
            run_id = self._run_id(client, run)
            are_files = folder is not None and urlparse(self.uri).scheme != "sqlite"
            return _OpenMLflow(client, run_id, held.pop_all(), are_files=are_files)

    def _run_id(self, client: Any, run: Run) -> str:
        present = client.get_experiment_by_name(self.experiment)
        experiment = present.experiment_id if present else client.create_experiment(self.experiment)
        runs = client.search_runs([experiment], filter_string=f"tags.`{JOB}` = '{run.job}'")
        by_name = {each.data.tags.get(RUN, ""): each.info.run_id for each in runs}
        name = run_name(run, [*by_name], time.time())
        if name in by_name:
            client.update_run(by_name[name], status="RUNNING")
            return str(by_name[name])
        tags = {JOB: run.job, RUN: name}
        created = client.create_run(experiment, tags=tags, run_name=f"{run.job} {name}")
        return str(created.info.run_id)


class _OpenMLflow(OpenRun):
    """Run in MLflow. With `are_files`, a metric is a file of its name: `loss` and `loss/val` cannot
    both be stored, so the later one of the two is left out, with a warning."""

    def __init__(self, client: Any, run_id: str, held: ExitStack, *, are_files: bool) -> None:
        self._client = client
        self._are_files = are_files
        self._stored = set(client.get_run(run_id).data.metrics)
        self._left_out: set[str] = set()
        self._held = held
        self._run_id = run_id
        self.written = _written(client, run_id)

    def write(self, step: int, values: Mapping[str, float], unix_s: float) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        at_ms = int(1000 * unix_s)
        metrics = [
            Metric(name, value, at_ms, step)
            for name, value in values.items()
            if self._can_store(name)
        ]
        for first in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + AT_ONCE])

    def _can_store(self, name: str) -> bool:
        if not self._are_files or name in self._stored:
            return True
        if name in self._left_out:
            return False
        for each in self._stored:
            if each.startswith(f"{name}/") or name.startswith(f"{each}/"):
                log.warning("logged_values_left_out", tracker="MLflow", name=name, stored=each)
                self._left_out.add(name)
                return False
        self._stored.add(name)
        return True

    def flush(self) -> None:
        """Do nothing: `write` returns only when its values are stored."""

    def close(self) -> None:
        with self._held:
            self._client.set_terminated(self._run_id)


def _folder(uri: str) -> Path | None:
    if uri == "databricks":  # MLflow's name for the server in the user's Databricks profile.
        return None
    parsed = urlparse(uri)
    if parsed.scheme == "sqlite":
        return Path(unquote(parsed.path[1:])).parent
    return Path(unquote(parsed.path)) if parsed.scheme in ("", "file") else None


def _written(client: Any, run_id: str) -> WriteProgress:
    written = WriteProgress()
    for name in client.get_run(run_id).data.metrics:
        step = max(each.step for each in client.get_metric_history(run_id, name))
        if step >= written.step:
            written = written.with_new(step, frozenset({name}))
    return written
