"""Members that wait at a step until the test releases them."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.members.standing_by import await_standby
from support.processes.ranks import Rank, Ranks

from shoal_client.local.cluster import LocalCluster


class HeldMembers:
    """Members with one body, each held before step `at_step`. `crew`: members by `names`."""

    def __init__(
        self,
        ranks: Ranks,
        body: Callable[..., None],
        run: Any,
        directory: Path,
        *,
        names: str = "ab",
        at_step: int,
    ) -> None:
        self._gates = {name: directory / name for name in names}
        for gate in self._gates.values():
            os.mkfifo(gate)
        runs = (
            replace(run, member_id=name, hold_at=at_step, gate=str(gate))
            for name, gate in self._gates.items()
        )
        self.crew: list[Rank] = [ranks.start(body, run) for run in runs]
        for rank in self.crew:
            rank.expect("holds")

    def release(self, names: str = "") -> None:
        """Release these members, or all."""
        for name in names or self._gates:
            self._gates[name].write_bytes(b"")


def replaced_in_step_6(
    cluster: LocalCluster, body: Callable[..., None], run: Any, directory: Path, earliest: int
) -> tuple[Mapping[str, Any], Mapping[str, Any], Rank, int]:
    """Return the final reports of "a" and "c", "a" itself, and the step with which "c" began.

    "b" was killed in the middle of step 6, and "c", on standby until then, took its place with the
    first step that no copy contains: `earliest` or, depending on the time that a copy takes, a
    later one."""
    with Ranks() as ranks:
        held = HeldMembers(ranks, body, run, directory, at_step=6)
        a, b = held.crew
        c = ranks.start(body, replace(run, member_id="c"))
        await_standby(cluster.http_url, run.job, "c")
        b.send_signal(signal.SIGKILL)
        held.release("a")
        tried, same = (tried_without_the_lost(rank) for rank in (c, a))
        assert tried == same
        assert tried["world_size"] == 2
        assert earliest <= tried["step"] <= max(6, earliest), tried
        return a.expect("finished"), c.expect("finished"), a, tried["step"]


def tried_without_the_lost(rank: Rank) -> dict[str, Any]:
    """Return a member's first attempt at a step in a later generation than the first.

    In the first it may continue until it notices the loss: with the other parts of the step, and
    with the next step if all had agreed on that before the loss.
    """
    while (tried := dict(rank.expect("tried"))).pop("generation") == 1:
        pass
    return tried


__all__ = ["HeldMembers", "replaced_in_step_6"]
