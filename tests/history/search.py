"""Search for the unknown pushes that made the versions which no acknowledgement names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from history.events import Gradients
from history.twin import Twin

MAX_BRANCHES = 100_000
MAX_BEFORE = 8


class Undecided(Exception):
    """Too many orders fit the seen values to try them all."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A push's part for the shard; the version it makes must be greater than `floor`."""

    name: str
    gradients: Gradients
    floor: int = 0


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Result of a search in which no order fits; describes the order that fits furthest."""

    good: int
    """The last seen version that it gives."""
    bad: int
    """The first seen version that it does not give, or for which no push is left."""
    between: Sequence[Placed]
    """The pushes of that order after `good`, up to `bad`."""
    acknowledged: Sequence[Placed]
    """The acknowledged pushes in `between`."""
    before: Sequence[Placed]
    """The last pushes up to `good`, at most MAX_BEFORE."""
    gap: str
    _start: Twin
    _wanted: int | None

    def gives(self, order: Sequence[Placed]) -> bool:
        """True if this order, applied after `good`, gives the values that were seen of `bad`."""
        twin = self._start.copy()
        for push in order:
            twin.apply(push.gradients)
        return twin.checksum() == self._wanted


@dataclass(frozen=True)
class _Branch:
    twin: Twin
    """State at the version before; shared with other branches."""
    version: int
    chosen: Mapping[int, Placed]
    """Unknown pushes that this branch assumes applied, by version; the last makes `version`."""


@dataclass(kw_only=True)
class _Failure:
    version: int = 0
    chosen: Mapping[int, Placed] = field(default_factory=dict)
    gap: str = ""


class Search:
    """A depth-first search over versions (see `checker`)."""

    def __init__(
        self,
        first: Twin,
        *,
        end: int,
        acknowledged: Mapping[int, Placed],
        unknown: Sequence[Placed],
        checksums: Mapping[int, int],
    ) -> None:
        self._first = first
        self._end = end
        self._acknowledged = acknowledged
        # Branches are taken from the end: the push that was sent last is tried first.
        self._unknown = sorted(unknown, key=lambda push: push.floor)
        self._checksums = checksums
        self._failure = _Failure()

    def run(self) -> Mapping[int, Placed] | Misfit:
        """Find the unknown pushes that were applied, by version, or a Misfit. Raises Undecided."""
        pending = self._go_on(self._first.copy(), 1, {})
        num_branches = 0
        while not isinstance(pending, Mapping):
            if not pending:
                return self._misfit()
            branch = pending.pop()
            num_branches += 1
            if num_branches > MAX_BRANCHES:
                raise Undecided(f"at version {branch.version} of {self._end}")
            twin = branch.twin.copy()
            twin.apply(branch.chosen[branch.version].gradients)
            found = self._go_on(twin, branch.version, branch.chosen)
            pending = found if isinstance(found, Mapping) else [*pending, *found]
        return pending

    def _go_on(
        self, twin: Twin, version: int, chosen: Mapping[int, Placed]
    ) -> Mapping[int, Placed] | list[_Branch]:
        """Replay from a version up to the end, a contradiction or a version that no push claims.

        At the end, return `chosen`, which fits; at a contradiction, no branches; otherwise a branch
        for each unknown push that may have made the version.
        """
        while self._checksums.get(version) in (None, twin.checksum()):
            if version == self._end:
                return chosen
            version += 1
            push = self._acknowledged.get(version)
            if push is None:
                return self._branches(twin, version, chosen)
            twin.apply(push.gradients)
        self._fail(version, chosen, "")
        return []

    def _branches(self, twin: Twin, version: int, chosen: Mapping[int, Placed]) -> list[_Branch]:
        taken = {push.name for push in chosen.values()}
        fitting = [p for p in self._unknown if p.floor < version and p.name not in taken]
        if not fitting:
            self._fail(version, chosen, f"no push is left that could have made {version}")
        return [_Branch(twin, version, {**chosen, version: push}) for push in fitting]

    def _fail(self, version: int, chosen: Mapping[int, Placed], gap: str) -> None:
        if version >= self._failure.version:
            self._failure = _Failure(version=version, chosen=chosen, gap=gap)

    def _misfit(self) -> Misfit:
        order = {**self._acknowledged, **self._failure.chosen}
        failed = self._failure.version
        bad = min((v for v in self._checksums if v >= failed), default=failed)
        good = max((v for v in self._checksums if v < failed), default=1)
        twin = self._first.copy()
        for version in range(2, good + 1):
            twin.apply(order[version].gradients)
        versions = range(good + 1, bad + 1)
        return Misfit(
            good=good,
            bad=bad,
            between=[order[v] for v in versions if v in order],
            acknowledged=[self._acknowledged[v] for v in versions if v in self._acknowledged],
            before=[order[v] for v in range(max(good - MAX_BEFORE, 1) + 1, good + 1)],
            gap=self._failure.gap,
            _start=twin,
            _wanted=self._checksums.get(bad),
        )


__all__ = ["MAX_BRANCHES", "Misfit", "Placed", "Search", "Undecided"]
