"""Who of the servers that a job's shards are on may be given shards, and who is dead. Pure: what
etcd lists and the time are arguments."""

from collections.abc import Mapping
from dataclasses import replace

from shoal_server.core.shards.absences import Absences
from shoal_server.core.shards.assignments import Holder, JobAssignments
from shoal_server.core.shards.rebalance import Servers, gone_on_without

SUSPECT_S = 3.0
RESCUE_AFTER_S = 10.0
"""A primary that etcd has not listed for so long is replaced by the coordinator. Its backup does so
at once if it does not hear of it; where it does, the primary is merely cut off from etcd, and goes
on meanwhile."""


class Sightings:
    """Of one job, as one coordinator has seen them since it leads."""

    def __init__(self, dead_after_s: float, longest_gap_s: float) -> None:
        """See `ReplicationLimits`."""
        self._dead_after_s = dead_after_s
        self._gone = Absences[Holder](longest_gap_s)
        self._gone_disks = Absences[str](longest_gap_s)
        self._suspect_until_s: dict[Holder, float] = {}
        self._away_s: Mapping[Holder, float] = {}
        self._last: JobAssignments | None = None
        """The record as it was when the servers were looked at last."""

    def judged(
        self,
        assignments: JobAssignments,
        seen: Servers,
        *,
        asked_s: float,
        now_s: float,
    ) -> Servers:
        """What is known of the servers that etcd listed when it was asked; `seen.dead` are those
        known to have ended."""
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

    def wrote(self, wished: JobAssignments, stands: JobAssignments) -> None:
        """The coordinator has written what it wished, where nobody else wrote meanwhile. What
        others did is still to be looked at."""
        if self._last is not None:
            triples = zip(self._last.shards, wished.shards, stands.shards, strict=True)
            shards = tuple(ours if ours == now else seen for seen, ours, now in triples)
            self._last = replace(self._last, shards=shards)

    @property
    def is_due_soon(self) -> bool:
        """Whether it is to be looked again before long: somebody is gone, or has been suspected."""
        return bool(self._suspect_until_s) or bool(self._away_s)

    def _dead(self, seen: Servers) -> frozenset[Holder]:
        """Holders that will not come back with what they held: they are known to have ended, or
        were away for so long that they acknowledge nothing any more. That another process has their
        name says nothing: they may be cut off, and serve."""
        return seen.dead | frozenset(
            holder for holder, for_s in self._away_s.items() if for_s >= self._dead_after_s
        )

    def _awaited(self) -> frozenset[Holder]:
        """Those that are gone and that nothing is done about yet."""
        return frozenset(holder for holder, for_s in self._away_s.items() if for_s < RESCUE_AFTER_S)

    def _disks(
        self, assignments: JobAssignments, seen: Servers, asked_s: float, now_s: float
    ) -> frozenset[str]:
        """Servers whose journals are not given up yet. One that is back and found nothing in its
        own has said so in the record."""
        present = {holder.server_id for holder in seen.present}
        disks = {h.on_disk for h in assignments.shards if h.on_disk}
        away_s = self._gone_disks.away_s(disks - present, now_s, asked_s=asked_s)
        return frozenset(disks & present) | {
            server_id for server_id, for_s in away_s.items() if for_s < self._dead_after_s
        }

    def _suspects(
        self, last: JobAssignments, assignments: JobAssignments, seen: Servers, now_s: float
    ) -> frozenset[Holder]:
        """Those whose peers went on without them. If they live after all, they are given shards
        again a little later."""
        dropped = gone_on_without(last, assignments) & seen.present
        self._suspect_until_s.update(dict.fromkeys(dropped, now_s + SUSPECT_S))
        self._suspect_until_s = {
            holder: until_s
            for holder, until_s in self._suspect_until_s.items()
            if until_s > now_s and holder in seen.present
        }
        return frozenset(self._suspect_until_s)
