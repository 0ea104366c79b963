"""Effects of faults on published weights, in bench/results/weights_faults.json.

    make bench NAME=weights_faults
    .venv/bin/python bench/weights_faults.py --faults 1000 --seed 2

Two members of a job publish after each step, and four readers install the newest version, two of
them through the memory of a server's host and two over TCP. Etcd, the coordinator, three parameter
servers, the members' host and two readers have network namespaces of their own. It needs root.

In each round, one to three faults occur at once: one of a server, the coordinator or etcd, one of
the trainer, one of a reader. Processes are killed (a member with its bytes on the servers but its
part not handed in, a reader with a lease and nothing fetched, all members at once, so that the job
starts over), halted for up to 6 s, or disconnected from others in one direction or both. The next
round begins once every reader has installed a version that was committed after the faults, and the
newest version is on two servers again.

- `weights_torn`: installs that mixed versions. `weights_regressed`: installs of an older version.
- `weights_unfenced`: numbers with two contents, and versions of an epoch that had ended.
- `weights_lost`: committed versions that are gone without having been replaced.
- `weights_recovery`: time from the end of a round's faults to the start of the next round.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import structlog

# The campaign and its cluster are part of the tests' support code.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from history.published_campaign import GROUPS, Fault, PublishedCampaign, Report, Stuck, draw
from rows import Row, publish, spread
from support.network.namespaces import why_unavailable

NUM_FAULTS = 300


def drawn(rng: random.Random) -> list[Fault]:
    """Draw the faults of a round, from one to three groups."""
    groups = rng.sample(GROUPS, rng.choice((1, 2, 3, 3)))
    return [draw(kinds, rng) for kinds in groups]


def rows(report: Report, struck: Counter[str], recoveries_s: list[float]) -> list[Row]:
    runs = struck.total()
    found = [
        Row(metric=f"weights_{what}", value=len(cases), unit="versions", runs=runs)
        for what, cases in (
            ("torn", report.torn),
            ("regressed", report.regressed),
            ("unfenced", report.unfenced),
            ("lost", report.lost),
        )
    ]
    found += [
        Row(metric="weights_versions", value=report.num_versions, unit="versions", runs=runs),
        Row(metric="weights_installs", value=report.num_installed, unit="installs", runs=runs),
    ]
    found += spread("weights_recovery", recoveries_s, "s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--faults", type=int, default=NUM_FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="end after this time")
    parser.add_argument("--keep", type=Path, help="directory in which all logs are kept")
    want = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if why := why_unavailable():
        raise SystemExit(why)
    ends_s = time.monotonic() + 60 * want.minutes
    struck: Counter[str] = Counter()
    recoveries_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = want.keep or Path(name)
        directory.mkdir(exist_ok=True)
        with PublishedCampaign(directory, want.seed) as run:
            try:
                while struck.total() < want.faults and time.monotonic() < ends_s:
                    faults = drawn(run.rng)
                    print(f"{struck.total()}: {'; '.join(map(str, faults))}", flush=True)
                    struck.update(str(fault.kind) for fault in faults)
                    recoveries_s.append(run.strike(faults))
                    print(f"  recovered after {recoveries_s[-1]:.1f} s", flush=True)
            except Stuck as stuck:
                print(f"STUCK: {stuck}", flush=True)
                print(run.judged(), flush=True)
                raise
            report = run.judged()
    print(report, dict(struck), flush=True)
    publish("weights_faults", rows(report, struck, recoveries_s))


if __name__ == "__main__":
    main()
