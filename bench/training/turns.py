"""Measures two systems in alternating blocks of steps. The processes of both stay alive; those of
one system wait while the other's run.

Other load on the machine slows a system down for seconds or minutes. Therefore a block of steps of
one system follows a block of the other within a second or two, and the result is the ratio of the
two. The median of many ratios is not affected if a few of them are disturbed.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import TracebackType
from typing import Self

from rows import Row

START_S = 180.0
"""Limit of a block; the first one includes the start of the processes."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Times of one system's ranks for some steps."""

    gaps_s: Sequence[float]
    """Seconds between consecutive steps, of all ranks."""
    cpu_s: float
    """CPU seconds of a rank for a step, without its loading processes."""


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Number of measured blocks, and of the steps in each."""

    pairs: int
    """Measured blocks of each of the two systems."""
    skipped: int
    """Steps at the beginning of a block that are not timed."""
    timed: int

    @property
    def arguments(self) -> list[str]:
        """Last arguments of the script, for `training.blocks.Blocks`: numbers of blocks, of skipped
        steps and of timed steps. Two blocks more than measured: the first includes the start of the
        processes, and during the last one ranks begin to exit, which takes CPU time."""
        return [str(self.pairs + 2), str(self.skipped), str(self.timed)]


class Ranks:
    """The processes of one system, which run inside its `with` block."""

    def __init__(
        self,
        name: str,
        script: Path,
        arguments: Sequence[str],
        plan: BlockPlan,
        surroundings: Sequence[Mapping[str, str]],
    ) -> None:
        """`surroundings`: environment variables of each rank, added to those of this process. The
        script is called with the arguments, a descriptor, and the plan's arguments."""
        self._name = name
        self._command = [sys.executable, str(script), *arguments]
        self._plan = plan
        self._surroundings = surroundings
        self._processes: list[subprocess.Popen[bytes]] = []
        self._results: list[int] = []

    def __enter__(self) -> Self:
        for surroundings in self._surroundings:
            reads, writes = os.pipe()
            self._results.append(reads)
            self._processes.append(
                subprocess.Popen(
                    [*self._command, str(writes), *self._plan.arguments],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **surroundings},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[writes],
                )
            )
            os.close(writes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, reads in zip(self._processes, self._results, strict=True):
            if error is not None:
                process.kill()
            ended = process.wait(START_S)
            os.close(reads)
            if ended and error is None:
                raise SystemExit(f"{self._name} ended with {ended}")

    def block(self) -> Block:
        """Let the ranks take the steps of one block."""
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            process.stdin.write(b"\n")
            process.stdin.flush()
        found = [json.loads(self._line(reads)) for reads in self._results]
        return Block(
            gaps_s=[gap for each in found for gap in each["gaps_s"]],
            cpu_s=sum(each["cpu_s"] for each in found) / len(found),
        )

    def _line(self, reads: int) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([reads], [], [], START_S)
            piece = os.read(reads, 1 << 16) if ready else b""
            if not piece:
                raise SystemExit(f"{self._name}: a rank did not finish a block")
            line += piece
        return line


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a comparison: pairs of a block of our system and a block of the other system."""

    pairs: Sequence[tuple[Block, Block]]
    figure: Callable[[Sequence[float]], float]
    """Figure of the times in a block: `median` or `mean`."""

    @property
    def overheads(self) -> list[float]:
        """Ratio of our time to the other's, by pair."""
        return [self.figure(own.gaps_s) / self.figure(other.gaps_s) for own, other in self.pairs]

    def rows(self, overhead: str, step: str, cpu: str, peer: str) -> list[Row]:
        """Return rows with these names; also print them in one line."""
        ratios, runs = self.overheads, len(self.pairs)
        times = [median(self.figure(each.gaps_s) for each in blocks) for blocks in self._sides()]
        used = [median(each.cpu_s for each in blocks) for blocks in self._sides()]
        low, _, high = quantiles(ratios, n=4) if runs > 1 else (ratios[0],) * 3
        print(
            f"{overhead}: {median(ratios):.3f}, half of {runs} within {low:.3f} to {high:.3f};"
            f" {times[0] * 1e3:.2f} ms, {peer} {times[1] * 1e3:.2f} ms;"
            f" CPU {used[0] * 1e3:.2f} ms, {used[1] * 1e3:.2f} ms",
            flush=True,
        )
        beside = [
            Row(
                metric=name,
                value=own * 1e3,
                unit="ms",
                runs=runs,
                peer=peer,
                peer_value=other * 1e3,
            )
            for name, (own, other) in ((step, times), (cpu, used))
        ]
        return [Row(metric=overhead, value=median(ratios), unit="", runs=runs), *beside]

    def _sides(self) -> tuple[list[Block], list[Block]]:
        return [own for own, _ in self.pairs], [other for _, other in self.pairs]


def compare(
    ours: Ranks, theirs: Ranks, num_pairs: int, figure: Callable[[Sequence[float]], float]
) -> Comparison:
    """Run `num_pairs` pairs of blocks; which system goes first changes from pair to pair."""
    for each in (ours, theirs):
        each.block()
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            other, own = theirs.block(), ours.block()
        else:
            own, other = ours.block(), theirs.block()
        pairs.append((own, other))
    for each in (ours, theirs):
        each.block()
    return Comparison(pairs=pairs, figure=figure)
