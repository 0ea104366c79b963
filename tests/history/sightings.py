"""Sightings of a shard's values by session and time, to explain a version that was seen with two
sets of values."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from history.events import Gradients, Seen, Verdict

MAX_SIGHTINGS = 4
"""Largest number of sightings of the same values that a message lists."""
AROUND = 3
"""Number of versions before and after a disputed one that a message lists."""
IN_FLIGHT_S = 5.0
"""A message lists pushes without an outcome if they were sent less than this before."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """A push with its final outcome, as far as its session knows it."""

    session: str
    sequence: int
    gradients: Gradients
    sent_s: float
    verdict: Verdict = Verdict.UNKNOWN
    answered_s: float = float("inf")
    versions: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.session}#{self.sequence}"


class Sightings:
    """Sightings of one shard, by version."""

    def __init__(self, shard_id: int, seen: Iterable[Seen], began_s: float) -> None:
        """Sort the events that were seen. Messages give times in seconds since `began_s`."""
        self._began_s = began_s
        self._seen: dict[int, list[tuple[Seen, int]]] = defaultdict(list)
        for event in sorted(seen, key=lambda e: e.at_s):
            version, checksum = event.values[shard_id]
            self._seen[version].append((event, checksum))

    @property
    def checksums(self) -> dict[int, int]:
        """Checksum of each version, as it was first seen."""
        return {version: seen[0][1] for version, seen in self._seen.items()}

    @property
    def disputed(self) -> list[int]:
        """Versions that were seen with more than one set of values."""
        return sorted(version for version in self._seen if len(self.values_of(version)) > 1)

    def values_of(self, version: int) -> list[int]:
        """Distinct checksums that were seen of a version, in the order of their first sighting."""
        return list(dict.fromkeys(checksum for _, checksum in self._seen[version]))

    def at(self, event: Seen) -> str:
        return f"{event.session} at {self._time(event.at_s)}"

    def dispute(self, version: int, order: Mapping[int, Push], unknown: Sequence[Push]) -> str:
        """Describe the sightings of that version, and the pushes around it. `order`: the
        acknowledged pushes by the version that each made."""
        parts = [f"{version} was seen with other values before"]
        for checksum in self.values_of(version):
            events = [self.at(event) for event, seen in self._seen[version] if seen == checksum]
            more = f" and {len(events) - MAX_SIGHTINGS} more" if len(events) > MAX_SIGHTINGS else ""
            parts.append(f"{checksum:#010x} by {', '.join(events[:MAX_SIGHTINGS])}{more}")
        parts += self._around(version, order)
        first_s = self._seen[version][0][0].at_s
        last_s = self._seen[version][-1][0].at_s
        open_then = [p for p in unknown if first_s - IN_FLIGHT_S < p.sent_s < last_s]
        parts += [f"{p}, sent at {self._time(p.sent_s)}, has no outcome" for p in open_then]
        return "; ".join(parts)

    def _around(self, version: int, order: Mapping[int, Push]) -> Iterable[str]:
        for near in range(version - AROUND, version + AROUND + 1):
            push = order.get(near)
            if push is None:
                who = "no answered push made it"
            else:
                times = f"{self._time(push.sent_s)} to {self._time(push.answered_s)}"
                who = f"made by {push}, {times}"
            by = ", ".join(self.at(event) for event, _ in self._seen.get(near, ())[:MAX_SIGHTINGS])
            yield f"{near}: {who}, seen by {by or 'no reader'}"

    def _time(self, at_s: float) -> str:
        return f"{at_s - self._began_s:.3f} s"


__all__ = ["Push", "Sightings"]
