"""Generation of ten thousand members: real coordinator, etcd and gRPC, members on 1,250 hosts.

    make bench NAME=generation           # 10,000 members
    .venv/bin/python bench/generation.py 2000
    .venv/bin/python bench/generation.py 10000 compact  # only the store: Gloo's addresses, compact
    .venv/bin/python bench/generation.py 1000 plain     # not compact, read by each rank

`generation_10000`: time from the Propose call of the last member until all members have the
committed record; the bench fails if records differ. `generation_10000_rss`: the coordinator's
resident memory then. `generation_10000_loss`: time from a launcher's report that a process of the
running generation has ended until all other members have the record of the next generation.
`attend_10000`: time until all members have attended. Everything runs on this machine, where the
members use most of the CPU time.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from membership import Drivers, coordinator
from rows import Row, publish

from shoal_client.local.start_time import cpu_s

DEFAULT_MEMBERS = 10_000
HEARTBEAT_S = 5.0
"""Interval of heartbeats. With one a second, the simulated hosts would keep two cores busy."""
DRIVER = Path(__file__).with_name("large_driver.py")


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure(num_members: int) -> dict[str, float]:
    """Return the figures by name, in seconds and megabytes."""
    with coordinator(HEARTBEAT_S) as running, ExitStack() as stack:
        drivers = Drivers(
            stack, running.address, "scale", num_members, driver=DRIVER, heartbeat_s=HEARTBEAT_S
        )
        attend_s = max(each["attend_s"] for each in drivers.ask("attend"))
        print(f"{num_members} attended within {attend_s:.1f} s", flush=True)
        drivers.ask("propose all", "propose others")
        before_s = cpu_s(running.pid)
        started_s = drivers.ask("state", "propose last")[1]["started_s"]
        held = drivers.ask("hold 1")
        if len({record for each in held for record in each["records"]}) != 1:
            raise SystemExit("members have different records")
        commit_s = max(each["held_s"] for each in held) - started_s
        used_s = cpu_s(running.pid) - before_s
        rss = rss_mb(running.pid)
        fetched = sum(each["num_bytes"] for each in drivers.ask("fetched"))
        print(f"committed to all in {commit_s:.2f} s, coordinator's CPU {used_s:.2f} s")
        print(
            f"coordinator's memory {rss:.0f} MB; rosters fetched {fetched / 1e6:.1f} MB", flush=True
        )
        ready_s = max(each["ready_s"] for each in drivers.ask("ready"))
        print(f"running after {ready_s:.2f} s more", flush=True)
        before_s = cpu_s(running.pid)
        lost_s = drivers.ask("state", "lose")[1]["started_s"]
        loss_s = max(each["held_s"] for each in drivers.ask("hold 2")) - lost_s
        used_s = cpu_s(running.pid) - before_s
        fetched = sum(each["num_bytes"] for each in drivers.ask("fetched"))
        print(f"next generation after a loss: {loss_s:.2f} s, coordinator's CPU {used_s:.2f} s")
        print(f"rosters fetched {fetched / 1e6:.1f} MB")
        if failures := [text for each in drivers.ask("state") for text in each["failures"]]:
            raise SystemExit(f"some members failed: {failures}")
        return {"attend": attend_s, "commit": commit_s, "rss": rss, "loss": loss_s}


def measure_rendezvous(num_members: int, form: str) -> tuple[float, float]:
    """Megabytes of all answers, and the coordinator's CPU seconds."""
    with coordinator() as running, ExitStack() as stack:
        drivers = Drivers(stack, running.address, "scale", num_members, driver=DRIVER)
        drivers.ask("attend")
        drivers.ask("propose all")
        drivers.ask("hold 1")
        before_s, started_s = cpu_s(running.pid), time.monotonic()
        done = drivers.ask(f"rendezvous {form} {num_members}")
        used_s = cpu_s(running.pid) - before_s
        size_mb = sum(each["num_bytes"] for each in done) / 1e6
        took_s = max(each["ended_s"] for each in done) - started_s
        set_mb = sum(each["set_bytes"] for each in done) / 1e6
        print(
            f"{num_members} ranks, {form}: set {set_mb:.1f} MB, read {size_mb:.1f} MB,"
            f" {took_s:.2f} s, CPU {used_s:.2f} s"
        )
        return size_mb, used_s


def main() -> None:
    if len(sys.argv) > 2:
        measure_rendezvous(int(sys.argv[1]), sys.argv[2])
        return
    num_members = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_MEMBERS
    seen = measure(num_members)
    name = f"generation_{num_members}"
    publish(
        "generation",
        [
            Row(metric=name, value=seen["commit"], unit="s", runs=1),
            Row(metric=f"{name}_rss", value=seen["rss"], unit="MB", runs=1),
            Row(metric=f"{name}_loss", value=seen["loss"], unit="s", runs=1),
            Row(metric=f"attend_{num_members}", value=seen["attend"], unit="s", runs=1),
        ],
    )


if __name__ == "__main__":
    main()
