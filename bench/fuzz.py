"""Reaction of a cluster to malformed inputs, in bench/results/fuzz.json.

    make bench NAME=fuzz
    .venv/bin/python bench/fuzz.py --inputs 20000 --seed 7     # a part of it
    .venv/bin/python bench/fuzz.py --inputs 20000 --add        # another part, added to the figures

Real processes on one machine: etcd, a coordinator, a parameter server with a journal. Each input is
drawn from the descriptor of a valid message, and then changed. Inputs go to every gRPC call, to the
bulk transport and to HTTP, and into records in etcd and files on disk. `fuzz_inputs`: number of
inputs. `fuzz_unhandled`: answers INTERNAL or UNKNOWN, tracebacks in logs, dead processes, and
exceptions other than a refusal. `fuzz_depositions`: leaders that lost their term.
`fuzz_rss_growth`: largest growth of a process' memory since its first rounds.
"""

import argparse
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

# The fuzzer is part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from fuzzing.campaign import run, tell
from rows import RESULTS, Row, publish

NUM_INPUTS = 200_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=NUM_INPUTS)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--add", action="store_true", help="add to the figures of earlier parts")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
        outcome = run(
            arguments.seed, seconds=0, num_inputs=arguments.inputs, directory=Path(folder)
        )
    tell(outcome)
    figures = {
        "fuzz_inputs": (outcome.num_inputs, "inputs"),
        "fuzz_unhandled": (len(outcome.findings.unhandled), "inputs"),
        "fuzz_depositions": (outcome.num_depositions, "terms"),
        "fuzz_rss_growth": (outcome.rss_growth_bytes / 2**20, "MiB"),
        "fuzz_duration": (time.monotonic() - began_s, "s"),
    }
    earlier = before() if arguments.add else {}
    publish("fuzz", [added(earlier.get(name), name, *each) for name, each in figures.items()])


def before() -> dict[str, Row]:
    """Read the results of earlier parts."""
    path = RESULTS / "fuzz.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    return {row["metric"]: Row(**row) for row in rows}


def added(earlier: Row | None, metric: str, value: float, unit: str) -> Row:
    """Combine parts: the sum of counts, and the largest growth of memory."""
    if earlier is None:
        return Row(metric=metric, value=value, unit=unit, runs=1)
    both = (earlier.value, value)
    total = max(both) if metric == "fuzz_rss_growth" else sum(both)
    return Row(metric=metric, value=total, unit=unit, runs=earlier.runs + 1)


if __name__ == "__main__":
    main()
