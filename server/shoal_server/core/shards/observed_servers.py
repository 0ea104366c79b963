"""Judgement of a job's servers: which may be given shards, and which are dead."""

from collections.abc import Mapping
from dataclasses import replace

from shoal_server.core.processes import Holder
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import JobAssignments
from shoal_server.core.shards.rebalance import Servers, dropped_holders

SUSPECT_S = 3.0
RESCUE_AFTER_S = 10.0
"""Time for which etcd has not listed a primary before the coordinator replaces it. A backup that
cannot reach the primary takes over earlier. A primary that its backup reaches is only cut off from
etcd, and serves until then."""


class ObservedServers:
    def __init__(self, dead_after_s: float, longest_gap_s: float) -> None:
        """Limits: see DEAD_AFTER_S and LONGEST_GAP_S of `core/replication/protocol/limits.py`."""
        self._dead_after_s = dead_after_s
        self._gone = ServerAbsences[Holder](longest_gap_s)
        self._gone_disks = ServerAbsences[str](longest_gap_s)
        self._suspect_until_s: dict[Holder, float] = {}
        self._away_s: Mapping[Holder, float] = {}
        self._last: JobAssignments | None = None

    def judged(
        self,
        assignments: JobAssignments,
        seen: Servers,
        *,
        asked_s: float,
        now_s: float,
    ) -> Servers:
        """Return `seen` with dead, awaited and suspect servers and disks filled in. `seen`: servers
        that etcd listed at `asked_s`, with those known to have ended."""
        last, self._last = self._last or assignments, assignments
        held_by = {holder for assignment in assignments.shards for holder in assignment.holders}
        self._away_s = self._gone.away_s(held_by - seen.present, now_s, asked_s=asked_s)
        dead = self._dead(seen)
        return replace(
            seen,
            dead=dead,
            awaited=self._awaited() - dead,
            suspects=self._suspects(last, assignments, seen, now_s),
            disks=self._disks(assignments, seen, asked_s, now_s),
        )

    def note_written(self, wished: JobAssignments, stands: JobAssignments) -> None:
        """Note that the coordinator wrote `wished`, and that the record is `stands` now. `judged`
        then suspects only servers that other processes dropped; none if the job was placed anew."""
        if stands.placement_id != wished.placement_id:
            self._last = None
        elif self._last is not None:
            triples = zip(self._last.shards, wished.shards, stands.shards, strict=True)
            shards = tuple(ours if ours == now else seen for seen, ours, now in triples)
            self._last = replace(self._last, shards=shards)

    @property
    def is_due_soon(self) -> bool:
        """True if a server is gone or suspected, so that servers must be judged again soon."""
        return bool(self._suspect_until_s) or bool(self._away_s)

    def _dead(self, seen: Servers) -> frozenset[Holder]:
        """Holders that have ended or no longer acknowledge. A new process under a holder's name
        proves nothing: the old one may still serve."""
        return seen.dead | frozenset(
            holder for holder, for_s in self._away_s.items() if for_s >= self._dead_after_s
        )

    def _awaited(self) -> frozenset[Holder]:
        return frozenset(holder for holder, for_s in self._away_s.items() if for_s < RESCUE_AFTER_S)

    def _disks(
        self, assignments: JobAssignments, seen: Servers, asked_s: float, now_s: float
    ) -> frozenset[str]:
        """Servers whose journals are not given up yet. A server that is back with an empty journal
        removes its disk from the record itself."""
        present = {holder.server_id for holder in seen.present}
        disks = {h.on_disk for h in assignments.shards if h.on_disk}
        away_s = self._gone_disks.away_s(disks - present, now_s, asked_s=asked_s)
        return frozenset(disks & present) | {
            server_id for server_id, for_s in away_s.items() if for_s < self._dead_after_s
        }

    def _suspects(
        self, last: JobAssignments, assignments: JobAssignments, seen: Servers, now_s: float
    ) -> frozenset[Holder]:
        dropped = dropped_holders(last, assignments) & seen.present
        self._suspect_until_s.update(dict.fromkeys(dropped, now_s + SUSPECT_S))
        self._suspect_until_s = {
            holder: until_s
            for holder, until_s in self._suspect_until_s.items()
            if until_s > now_s and holder in seen.present
        }
        return frozenset(self._suspect_until_s)
