"""Gain from reconfiguring one process group over all generations: `join(reconfigure=True)`.

    make bench NAME=reconfigure TORCH=2.15.0
    .venv-torch-2.15.0/bin/python bench/reconfigure.py 4 6    # rounds, kills in each

Needs torch 2.14 or newer. Jobs with and without the option run in turns on one cluster. As in
bench/recovery.py, a job has four DDP workers over Gloo, of which one is killed again and again. The
peer of each figure is the job without the option: a new group for each generation.

- `reconfigure_kill_recovery`: seconds from the SIGKILL to the first step that all survivors have
  committed.
- `reconfigure_connect`: seconds that a member takes to connect the group of a generation, waiting
  for the others included.

`SHOAL_RECONFIGURE=1 python bench/strategies.py fds ddp fsdp` counts descriptors per generation.
"""

import re
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median

from recovery import strikes
from rows import Row, publish
from training.jobs import NUM_WORKERS, ShoalJob

from shoal.backends.choice import check_reconfigures
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

NUM_ROUNDS, NUM_KILLS = 3, 5
_CONNECTED = re.compile(r"generation_entered.*?connect_s=([0-9.]+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def measure(cluster: LocalCluster, place: Path, way: str, num_kills: int) -> dict[str, list[float]]:
    """Measure one job. Connecting the first generation does not count."""
    variables = {"SHOAL_RECONFIGURE": way, "SHOAL_LOG_LEVEL": "debug"}
    with ShoalJob(cluster, place, max_members=NUM_WORKERS, variables=variables) as job:
        kills = strikes(job.steps, place, signal.SIGKILL, num_kills)
        log = "".join(_COLOUR.sub("", each.read_text()) for each in place.glob("launcher-*.log"))
    taken = [float(found[1]) for found in _CONNECTED.finditer(log)]
    return {"kill_recovery": kills, "connect": taken[NUM_WORKERS:]}


def main() -> None:
    check_reconfigures("gloo")
    asked = [int(word) for word in sys.argv[1:3]]
    num_rounds, num_kills = [*asked, *(NUM_ROUNDS, NUM_KILLS)[len(asked) :]]
    seen: dict[str, dict[str, list[float]]] = {"0": {}, "1": {}}
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for turn in range(2 * num_rounds):
                way = "01"[turn % 2]
                place = Path(name) / f"{'reconfigured' if way == '1' else 'new'}-{turn}"
                for metric, values in measure(cluster, place, way, num_kills).items():
                    seen[way].setdefault(metric, []).extend(values)
    rows = [
        Row(
            metric=f"reconfigure_{metric}{suffix}",
            value=of(seen["1"][metric]),
            unit="s",
            runs=len(seen["1"][metric]),
            peer="new-group",
            peer_value=of(seen["0"][metric]),
        )
        for metric in seen["1"]
        for suffix, of in (("", median), ("_max", max))
    ]
    publish("reconfigure", rows)


if __name__ == "__main__":
    main()
