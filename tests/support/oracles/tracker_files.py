"""Contents of a job's trackers, read with their own packages."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray
from wandb.proto.wandb_internal_pb2 import Record

from shoal.tracking.weights_and_biases import records

Logged = Mapping[str, list[tuple[int, float]]]
"""(step, value) by name, in order of steps, as often as each was written."""


def of_tensorboard(directory: Path, job: str) -> dict[str, Logged]:
    """Read TensorBoard's values, by run."""
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted((directory / "tensorboard" / job).glob("run-*/events.*")):
        found = runs.setdefault(path.parent.name, defaultdict(list))
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = float(make_ndarray(value.tensor)) if value.HasField("tensor") else 0.0
                found[value.tag].append((event.step, number or value.simple_value))
    return {name: _ordered(run) for name, run in sorted(runs.items())}


def of_wandb(directory: Path, job: str) -> dict[str, Logged]:
    runs: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted((directory / "wandb").glob(f"offline-run-*/run-{job}-*.wandb")):
        found = runs.setdefault(path.stem.removeprefix(f"run-{job}-"), defaultdict(list))
        _await_written(path)
        for row in _rows(path):
            for name, value in row.items():
                if name != "step" and not name.startswith("_"):
                    found[name].append((int(row["step"]), value))
    return {name: _ordered(run) for name, run in sorted(runs.items())}


def _await_written(path: Path) -> None:
    """Wait until wandb's own process has written the end of the run to the file."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        kinds = [Record.FromString(data).WhichOneof("record_type") for data in records(path)]
        if "exit" in kinds or time.time() - path.stat().st_mtime > 2:
            return
        time.sleep(0.05)


def _rows(path: Path) -> Iterable[dict[str, float]]:
    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        items = record.history.item
        if items:
            keys = [item.key or item.nested_key[0] for item in items]
            yield {key: json.loads(item.value_json) for key, item in zip(keys, items, strict=True)}


def of_mlflow(directory: Path, job: str) -> dict[str, Logged]:
    client = MlflowClient(tracking_uri=f"file:{directory / 'mlruns'}")
    experiment = client.get_experiment_by_name("shoal")
    assert experiment is not None
    runs = {}
    for run in client.search_runs([experiment.experiment_id], f"tags.`shoal.job` = '{job}'"):
        found = {
            name: [
                (each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)
            ]
            for name in run.data.metrics
        }
        runs[run.data.tags["shoal.run"]] = _ordered(found)
    return dict(sorted(runs.items()))


def _ordered(found: Mapping[str, list[tuple[int, float]]]) -> Logged:
    return {name: sorted(values) for name, values in found.items()}


READ = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}
