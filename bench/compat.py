"""Twenty programs as their authors write them, and the same with Shoal, with three kills each.

    make bench NAME=compat
    .venv/bin/python bench/compat.py gpt gan    # some of them

A program of compat_programs/plain trains in one process. The program of the same name in
compat_programs/shoal trains under `shoal run` with three workers and a minimum of two. One worker
is killed; twice more, another one is killed once at least two train in a later generation.
`compat_exact`: number of programs whose final weights equal the plain program's within TOLERANCES.
The programs are not changed for this, but run with float64 as default dtype (compat_driver.py).
The prefix of torch.compile in the names of weights is ignored.

In float64 autocast does nothing. So "gpt" runs once more as written, with bfloat16. Its
`compat_difference_gpt_bf16` may be at most twice the peer value: the difference that the plain
program shows in the same run between several splits of its batches into micro-batches.
`compat_lines_changed`: most lines changed in any program, without indentation and empty lines. Of
each changed passage, the longer of the two versions counts.
"""

import difflib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import torch
from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import ChildCommand, Process, Supervisor

PROGRAMS = Path(__file__).parent / "compat_programs"
DRIVER = Path(__file__).parent / "compat_driver.py"
EXACT, SINGLE = 1e-9, 1e-7
TOLERANCES: Mapping[str, float] = {
    "gpt": EXACT,
    "resnet": EXACT,
    "gan": EXACT,
    "hf_trainer": SINGLE,  # transformers computes the loss of a language model in float32
    "lightning_fit": EXACT,
    "accelerate_loop": EXACT,
    "stream": EXACT,
    "ema": EXACT,
    "compiled": EXACT,
    "meta_fsdp": EXACT,
    "moe": EXACT,
    "sam": EXACT,
    "keras_fit": SINGLE,  # Keras computes the mean of a loss in float32
    "eight_bit": EXACT,
    "lora_int8": EXACT,
    "resume": EXACT,
    "one_cycle": EXACT,
    "two_heads": EXACT,
    "muon": EXACT,
    "complex_weights": EXACT,
}
"""Maximum absolute difference of a weight, by program."""
FULL, AS_WRITTEN = "float64", "float32"
"""Dtypes in which programs run. In float64 a difference is a fault; in float32 training amplifies a
rounding error millions of times (6e-3 in 360 steps of AdamW, 1e-2 in 120 of a ResNet)."""
AUTOCAST: Mapping[str, tuple[str, Sequence[str]]] = {
    "gpt": ("= 8, 4, 2", ("= 4, 8, 2", "= 2, 16, 2", "= 16, 2, 2"))
}
"""Programs that use autocast: their split of a batch into micro-batches, and other splits of it."""
NUM_WORKERS, NUM_KILLS, MIN_STEPS = 3, 3, 3
TIMES_PLAIN = 2
COMPILED = "_orig_mod."
LIMIT_S, POLL_S, SEED = 240.0, 0.02, 18
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The largest differences of a weight."""

    name: str
    difference: float
    """Difference in float64."""
    in_16_bits: float = 0.0
    """Difference of the two programs as written, if they use autocast."""
    plain_in_16_bits: float = 0.0
    """Difference of the plain program from itself, with other splits of batches."""

    @property
    def is_exact(self) -> bool:
        is_as_close = self.in_16_bits <= TIMES_PLAIN * self.plain_in_16_bits
        return self.difference <= TOLERANCES[self.name] and is_as_close

    def __str__(self) -> str:
        text = f"{self.difference:.3g} of {TOLERANCES[self.name]:g}"
        if self.name in AUTOCAST:
            text += f", in 16 bits {self.in_16_bits:.3g} of {self.plain_in_16_bits:.3g}"
        return f"{text}: {'exact' if self.is_exact else 'not exact'}"

    def rows(self) -> list[Row]:
        metric = f"compat_difference_{self.name}"
        rows = [Row(metric=metric, value=self.difference, unit="", runs=1)]
        if self.name in AUTOCAST:
            in_16_bits = Row(
                metric=f"{metric}_bf16",
                value=self.in_16_bits,
                unit="",
                runs=1,
                peer="plain, cut otherwise",
                peer_value=self.plain_in_16_bits,
            )
            rows.append(in_16_bits)
        return rows


class Unfinished(Exception):
    """Raised if a program fails, does not end, or ends before its last kill."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """State of a job, as its coordinator knows it."""

    generation: int
    step: int
    pids: tuple[int, ...]


class StruckProgram:
    """A program's job, and the faults injected into it."""

    def __init__(self, cluster: LocalCluster, directory: Path, name: str, dtype: str) -> None:
        self._cluster, self._directory = cluster, directory
        self._job = f"compat-{name.replace('_', '-')}-{dtype}"
        self._script = PROGRAMS / "shoal" / f"{name}.py"
        self._dtype = dtype
        self._random = random.Random(f"{SEED} {name}")
        self.weights = directory / "shoal.pt"

    def run(self, num_kills: int) -> None:
        """Train, with this number of kills. Raises Unfinished."""
        give_up_s = time.monotonic() + LIMIT_S
        with Supervisor(grace_s=2.0) as supervisor:
            launcher = supervisor.spawn(self._command())
            last = Training(generation=0, step=0, pids=())
            for number in range(num_kills):
                # Later kills do not wait until the launcher has replaced the lost worker.
                size = NUM_WORKERS if number == 0 else 2
                last = self._await(launcher, last, size, give_up_s)
                os.kill(self._random.choice(last.pids), signal.SIGKILL)
            if launcher.wait(max(1.0, give_up_s - time.monotonic())) != 0:
                raise Unfinished(f"failed: {self._log()}")

    def _await(self, launcher: Process, last: Training, size: int, give_up_s: float) -> Training:
        """Wait until `size` members have committed MIN_STEPS steps in a later generation. Raises
        Unfinished."""
        began: dict[int, int] = {}
        with httpx.Client(base_url=self._cluster.http_url, trust_env=False, timeout=10) as client:
            while time.monotonic() < give_up_s:
                if launcher.exit_code is not None:
                    raise Unfinished(f"ended before its last kill: {self._log()}")
                now = self._now(client)
                if now is not None and now.generation > last.generation and len(now.pids) >= size:
                    first = began.setdefault(now.generation, now.step)
                    if now.step >= first + MIN_STEPS:
                        return now
                time.sleep(POLL_S)
        raise Unfinished(f"fewer than {size} workers train: {self._log()}")

    def _now(self, client: httpx.Client) -> Training | None:
        answer = client.get(f"/api/v1/jobs/{self._job}/members")
        if answer.status_code != httpx.codes.OK:
            return None
        members: list[dict[str, Any]] = [each["member"] for each in answer.json()]
        training = [each for each in members if each["state"] == "training"]
        if not training:
            return None
        generation = max(each["generation"] for each in training)
        within = [each for each in training if each["generation"] == generation]
        return Training(
            generation=generation,
            step=min(each["step"] for each in within),
            pids=tuple(each["process"]["pid"] for each in within),
        )

    def _command(self) -> ChildCommand:
        return ChildCommand(
            name="launcher",
            arguments=(
                *(sys.executable, "-m", "shoal_client", "run", "-n", str(NUM_WORKERS)),
                *("--min", "2", "--job", self._job, "--coordinator", self._cluster.coordinator),
                *("--max-restarts", "100", str(DRIVER), self._dtype),
                *(str(self._script), str(self.weights)),
            ),
            environment=ENVIRONMENT,
            log_path=self._directory / "shoal.log",
        )

    def _log(self) -> str:
        return (self._directory / "shoal.log").read_text()[-3000:]


def difference(
    cluster: LocalCluster, directory: Path, name: str, dtype: str, num_kills: int
) -> float:
    """Train a program with kills. Return the largest difference of a weight from the plain
    program's. Raises Unfinished."""
    directory.mkdir()
    expected = plain_weights(directory, PROGRAMS / "plain" / f"{name}.py", dtype)
    struck = StruckProgram(cluster, directory, name, dtype)
    struck.run(num_kills)
    return largest(expected, load(struck.weights))


def rounding(directory: Path, name: str) -> float:
    """Measure the rounding error: the difference of the plain program from itself with other batch
    splits."""
    directory.mkdir()
    script = PROGRAMS / "plain" / f"{name}.py"
    cut, others = AUTOCAST[name]
    expected = plain_weights(directory, script, AS_WRITTEN)
    found = [expected]
    for number, other in enumerate(others):
        source = script.read_text()
        assert source.count(cut) == 1, f"{script} does not have {cut!r} once"
        place = directory / str(number)
        place.mkdir()
        (place / script.name).write_text(source.replace(cut, other))
        found.append(plain_weights(place, place / script.name, AS_WRITTEN))
    return max(largest(one, other) for one, other in combinations(found, 2))


def plain_weights(directory: Path, script: Path, dtype: str) -> Mapping[str, torch.Tensor]:
    weights = directory / "plain.pt"
    done = subprocess.run(
        [sys.executable, str(DRIVER), dtype, str(script), str(weights)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Unfinished(f"the plain program failed: {done.stderr[-2000:]}")
    return load(weights)


def load(path: Path) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = torch.load(path, weights_only=True)
    return {name.removeprefix(COMPILED): each for name, each in found.items()}


def largest(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a weight. Raises Unfinished if the names differ."""
    if expected.keys() != found.keys():
        raise Unfinished(f"weights of one program only: {sorted(expected.keys() ^ found.keys())}")
    pairs = [(as_double(expected[key]), as_double(found[key])) for key in expected]
    return max(float((one - other).abs().max()) for one, other in pairs)


def as_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def lines_changed(name: str) -> int:
    plain, with_shoal = (lines_of(PROGRAMS / kind / f"{name}.py") for kind in ("plain", "shoal"))
    matcher = difflib.SequenceMatcher(None, plain, with_shoal, autojunk=False)
    return sum(
        max(end - start, other_end - other_start)
        for what, start, end, other_start, other_end in matcher.get_opcodes()
        if what != "equal"
    )


def lines_of(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def main() -> None:
    """Run the named programs, or all. Figures are published only if all were asked for. Exits with
    1 if a program is not exact."""
    names = sys.argv[1:] or list(TOLERANCES)
    if unknown := sorted(set(names) - set(TOLERANCES)):
        raise SystemExit(f"no program {', '.join(unknown)}; there are: {', '.join(TOLERANCES)}")
    changed = {name: lines_changed(name) for name in names}
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as temporary:
        config = LocalClusterConfig(directory=Path(temporary) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for name in names:
                try:
                    compared = compare(cluster, Path(temporary) / name, name)
                except Unfinished as error:
                    print(f"{name}: {error}", flush=True)
                    continue
                print(f"{name}: {compared}, {changed[name]} lines changed", flush=True)
                found.append(compared)
    num_exact = sum(each.is_exact for each in found)
    if len(names) == len(TOLERANCES):
        publish("compat", rows_of(found, changed, num_exact))
    if num_exact < len(names):
        raise SystemExit(f"{num_exact} of {len(names)} exact")


def compare(cluster: LocalCluster, place: Path, name: str) -> Compared:
    """Compare a program's weights with the plain program's. Raises Unfinished."""
    place.mkdir()
    exactly = difference(cluster, place / FULL, name, FULL, NUM_KILLS)
    if name not in AUTOCAST:
        return Compared(name=name, difference=exactly)
    return Compared(
        name=name,
        difference=exactly,
        in_16_bits=difference(cluster, place / AS_WRITTEN, name, AS_WRITTEN, NUM_KILLS),
        plain_in_16_bits=rounding(place / "rounding", name),
    )


def rows_of(found: Sequence[Compared], changed: Mapping[str, int], num_exact: int) -> list[Row]:
    return [
        *(row for each in found for row in each.rows()),
        *(
            Row(metric=f"compat_lines_{name}", value=count, unit="lines", runs=1)
            for name, count in changed.items()
        ),
        Row(metric="compat_exact", value=num_exact, unit=f"of {len(changed)}", runs=1),
        Row(metric="compat_lines_changed", value=max(changed.values()), unit="lines", runs=1),
    ]


if __name__ == "__main__":
    main()
