"""Cost of mutual TLS, compared with the same without it in the same run.

    make bench NAME=tls
    .venv/bin/python bench/tls.py 16    # kills instead of the default
    .venv/bin/python bench/tls.py --only kills    # one part: steps, exchanges or kills

- `step_overhead_tls`: median step of DDP with a cluster that uses TLS, over the median step without
  TLS, each with two ranks on Gloo in processes of their own. Blocks of the two alternate; the
  figure is the median of the blocks' ratios.
- `pull_push_100mb_tls` (GB/s, both directions): push of 100 MB of gradients and return of 100 MB of
  values by a TLS socket, in turns with a plain socket (`tcp`).
- `pull_push_100mb_shared_memory_with_tls`: the same by shared memory with TLS on, in turns with TLS
  off.
- `ddp_kill_recovery_tls`: as `ddp_kill_recovery` of bench/recovery.py, with TLS on.
"""

import argparse
import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from exchange.by_turns import by_turns, ratio
from recovery import strikes
from rows import Row, publish
from strategies import NUM_RANKS, PAIRS, PAUSE_MS, SCRIPT, SKIPPED, TIMED
from training.jobs import NUM_WORKERS, ShoalJob
from training.turns import BlockPlan, Ranks, compare

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.connection.transport import TRANSPORT_VARIABLE
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.tls.identity import FOLDER_VARIABLE

NUM_EXCHANGES, NUM_KILLS = 9, 16
OWN = "parameter_client"


def cluster_in(place: Path, certificates: Path | None) -> LocalCluster:
    return LocalCluster(
        LocalClusterConfig(directory=place, num_parameter_servers=0, certificates=certificates)
    )


def steps(place: Path, certificates: Path) -> list[Row]:
    plan = BlockPlan(pairs=PAIRS, skipped=SKIPPED, timed=TIMED)
    with ExitStack() as stack:

        def ranks(name: str, folder: Path | None) -> Ranks:
            cluster = stack.enter_context(cluster_in(place / name, folder))
            session = {
                "SHOAL_COORDINATOR": cluster.coordinator,
                "SHOAL_JOB": "steps",
                "SHOAL_DESIRED_MEMBERS": str(NUM_RANKS),
                FOLDER_VARIABLE: str(folder or ""),
            }
            surroundings = [{**session, "RANK": str(rank)} for rank in range(NUM_RANKS)]
            arguments = ["shoal", "ddp", str(PAUSE_MS)]
            return stack.enter_context(Ranks(name, SCRIPT, arguments, plan, surroundings))

        found = compare(ranks("tls", certificates), ranks("plain", None), plan.pairs, median)
    return found.rows("step_overhead_tls", "step_time_tls", "step_cpu_tls", "plain")


def exchanges(certificates: Path) -> list[Row]:
    folder = {FOLDER_VARIABLE: str(certificates)}
    entrants = {
        "tls": (OWN, {TRANSPORT_VARIABLE: "tcp", **folder}),
        "tcp": (OWN, {TRANSPORT_VARIABLE: "tcp"}),
        "shared_memory": (OWN, {TRANSPORT_VARIABLE: "auto", **folder}),
        "shared_memory_plain": (OWN, {TRANSPORT_VARIABLE: "auto"}),
    }
    turns = by_turns(entrants, 1, NUM_EXCHANGES)
    rows = []
    for name, ours, peer in (
        ("pull_push_100mb_tls", "tls", "tcp"),
        ("pull_push_100mb_shared_memory_with_tls", "shared_memory", "shared_memory_plain"),
    ):
        own, theirs = turns[ours], turns[peer]
        row = Row(
            metric=name,
            value=median(own),
            unit="GB/s",
            runs=len(own),
            peer=peer,
            peer_value=median(theirs),
        )
        over = Row(metric=f"{name}_over_{peer}", value=ratio(own, theirs), unit="", runs=len(own))
        rows += [row, over]
    return rows


def kills(place: Path, certificates: Path, num_kills: int) -> list[Row]:
    os.environ[FOLDER_VARIABLE] = str(certificates)
    try:
        with cluster_in(place / "cluster", certificates) as cluster:
            job = place / "shoal"
            with ShoalJob(cluster, job, max_members=NUM_WORKERS) as running:
                seen = strikes(running.steps, job, signal.SIGKILL, num_kills)
    finally:
        del os.environ[FOLDER_VARIABLE]
    return [Row(metric="ddp_kill_recovery_tls", value=median(seen), unit="s", runs=len(seen))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", nargs="?", type=int, default=NUM_KILLS)
    parser.add_argument("--only", choices=("steps", "exchanges", "kills"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = CertificateFolder(place / "certs")
        folder.init()
        parts = {
            "steps": lambda: steps(place / "steps", folder.path),
            "exchanges": lambda: exchanges(folder.path),
            "kills": lambda: kills(place / "kills", folder.path, arguments.kills),
        }
        wanted = [arguments.only] if arguments.only else list(parts)
        rows = [row for name in wanted for row in parts[name]()]
    publish("tls", rows)


if __name__ == "__main__":
    main()
