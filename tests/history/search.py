"""Which unknown pushes stand at the versions that no acknowledgement tells of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from history.events import Gradients
from history.twin import Twin

MAX_BRANCHES = 100_000
MAX_BEFORE = 8


class Undecided(Exception):
    """Too many orders fit what was seen to try them all."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A push's part for the shard, and the version that it must stand above."""

    name: str
    gradients: Gradients
    floor: int = 0


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """No order fits: how far the best one went."""

    good: int
    """The last seen version that it gives."""
    bad: int
    """The first seen version that it does not give, or that no push is left for."""
    between: Sequence[Placed]
    """The pushes of that order from the one to the other."""
    acknowledged: Sequence[Placed]
    """Those of them that were acknowledged."""
    before: Sequence[Placed]
    """Those right before."""
    gap: str
    _start: Twin
    _wanted: int | None

    def gives(self, order: Sequence[Placed]) -> bool:
        """Whether this order instead gives the values seen."""
        twin = self._start.copy()
        for push in order:
            twin.apply(push.gradients)
        return twin.checksum() == self._wanted


@dataclass(frozen=True)
class _Branch:
    twin: Twin
    """As of the version before; others may go on from it too."""
    version: int
    chosen: Mapping[int, Placed]
    """By version: the unknown pushes that it takes for applied, this version's the last."""


@dataclass(kw_only=True)
class _Failure:
    version: int = 0
    chosen: Mapping[int, Placed] = field(default_factory=dict)
    gap: str = ""


class Search:
    """Depth first, by version; see `checker`."""

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
        # The one sent last stands there most likely.
        self._unknown = sorted(unknown, key=lambda push: push.floor)
        self._checksums = checksums
        self._failure = _Failure()

    def run(self) -> Mapping[int, Placed] | Misfit:
        """The unknown pushes that were applied, by version, or how far it is possible to go."""
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
        """From a version on until the end (`chosen` fits), a contradiction (no branches), or a
        version that nobody was told of (a branch for each push that may stand there)."""
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
