"""Runs the cases that need a GPU, the one that matters most first.

    make gpu-test                                   # 8 minutes at most, on one GPU or more
    make gpu-test GPU="--only K1,L --out /tmp/gpu"  # some of it
    make gpu-test GPU="--device cpu"                # a trial of the cases, over Gloo

Each case has processes of its own and a limit; one that fails does not keep the others from being
run. It prints a line of JSON a case, and writes the same to DIRECTORY/results.jsonl at once;
DIRECTORY/gpu.json holds all of them in the end, with the versions of what ran.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu.cases import CASES, Entry
from gpu.machine import Machine, shared_by_time, versions
from support.processes.marked import Mark

TESTS = Path(__file__).parents[1]
SECONDS = 480.0
ON_CPU_SECONDS = 1500.0
ON_CPU = 3.0
"""Factor of the cases' limits on a CPU: two cores do the work of a GPU and its host."""
LEAST_S = 5.0
"""Minimum remaining time for which a case is begun."""
END_S = 10.0
"""Time that the processes of a case may take to end after it."""
ERROR_BYTES = 4000


class Running:
    """The process of one case: it imports what it needs, and waits for the signal to run."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.mark = Mark()
        self._log = folder / "output.log"
        settings = folder / "settings.json"
        paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH", "")])]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpu.begin", name, str(settings)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    **self.mark.environment,
                    "PYTHONPATH": os.pathsep.join(paths),
                },
                start_new_session=True,
            )

    def finish(self, limit_s: float, end_s: float) -> str:
        """Let the process run the case; return the error, or an empty text. No process of the case
        is left then.

        `end_s`: time that its other processes may take to end after it.
        """
        try:
            self.process.communicate(b"go\n", timeout=limit_s)
            code = self.process.returncode
            error = f"exit code {code}: {self._printed()}" if code else ""
        except subprocess.TimeoutExpired:
            error = f"not over after {limit_s:g} s: {self._printed()}"
        left = self.end(0.0 if error else end_s)
        return error or (f"processes were left: {sorted(left.values())}" if left else "")

    def end(self, within_s: float = 0.0) -> dict[int, str]:
        """Kill the processes that are left after that time; return them."""
        left = self.mark.kill(within_s)
        self.process.wait()
        return left

    def _printed(self) -> str:
        return self._log.read_text()[-ERROR_BYTES:]


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A run over cases."""

    machine: Machine
    out: Path
    seconds: float
    """Limit of all cases together."""
    patience: float
    """Factor of the cases' limits."""
    cases: Mapping[str, Entry]
    module: str = "gpu.cases"
    """The module in which the processes find the cases, as CASES."""

    def run(self) -> list[dict[str, Any]]:
        """Run all cases, and return their lines. No process of a case is left, even after an
        interrupt."""
        self.out.mkdir(parents=True, exist_ok=True)
        results = self.out / "results.jsonl"
        results.write_text("")
        until_s = time.monotonic() + self.seconds
        ran = versions()
        print(json.dumps({"versions": ran, **asdict(self.machine)}), flush=True)
        lines = []
        with shared_by_time(self.machine, self.out.resolve()) as shared, ExitStack() as ends:
            names = list(self.cases)
            running = self._start(names[0], shared, ends) if names else None
            for name, following in zip(names, [*names[1:], None], strict=True):
                assert running is not None
                current = running
                running = self._start(following, shared, ends) if following else None
                line = self._line(name, current, until_s - time.monotonic())
                lines.append(line)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
        day = time.strftime("%Y-%m-%d", time.gmtime())
        whole = {"day": day, "versions": ran, "machine": asdict(self.machine), "cases": lines}
        (self.out / "gpu.json").write_text(json.dumps(whole, indent=2) + "\n")
        return lines

    def _folder(self, name: str) -> Path:
        return (self.out / name).resolve()

    def _start(self, name: str, shared: Mapping[str, str], ends: ExitStack) -> Running:
        """Start the process of a case, which begins with the imports, in a folder without files of
        an earlier run. Its processes end with `ends`."""
        folder = self._folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        given = {"machine": asdict(self.machine), "module": self.module}
        (folder / "settings.json").write_text(json.dumps(given))
        variables = {} if self.cases[name].kills else shared
        running = Running(name, folder, {**self.machine.environment(os.environ), **variables})
        ends.callback(running.end)
        return running

    def _line(self, name: str, running: Running, left_s: float) -> dict[str, Any]:
        """Run one case, and return its line."""
        entry, folder = self.cases[name], self._folder(name)
        line: dict[str, Any] = {"name": name, "title": entry.title, "passed": False}
        if left_s < LEAST_S:
            running.end()
            return {**line, "seconds": 0.0, "error": f"not run: the {self.seconds:g} s are over"}
        begun_s = time.monotonic()
        error = running.finish(min(entry.limit_s * self.patience, left_s), END_S * self.patience)
        if error and (recorded := folder / "error.txt").exists():
            error = recorded.read_text()[-ERROR_BYTES:]
        line |= {"passed": not error, "seconds": round(time.monotonic() - begun_s, 1)}
        return line | _outcome(folder) | ({"error": error} if error else {})


def _outcome(folder: Path) -> dict[str, Any]:
    """The figures that the case measured."""
    path = folder / "outcome.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in found.items() if value}


def chosen(only: str) -> dict[str, Entry]:
    """The cases with these names, most important first. Raises SystemExit."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only.strip() and not names:
        raise SystemExit(f"--only {only!r} names no case; there are: {', '.join(CASES)}")
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are: {', '.join(CASES)}")
    return {name: entry for name, entry in CASES.items() if not names or name in names}


def check_free(out: Path, names: Iterable[str]) -> None:
    """Raise SystemExit if a folder with a case's name holds other files: such a folder is removed
    before the case begins."""
    if out.exists() and not out.is_dir():
        raise SystemExit(f"--out {out}: no folder")
    for name in names:
        folder = out / name
        if folder.exists() and not (folder / "settings.json").exists():
            raise SystemExit(
                f"--out {out}: it has a {folder.name} that is not of these cases, where case"
                f" {name} would write; name another folder"
            )


def make_out(out: Path) -> None:
    """Make the folder of the results. Raises SystemExit if it cannot be written to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_text("")
    except OSError as error:
        raise SystemExit(f"--out {out}: nothing can be written there ({error})") from error


def machine_of(device: str, backend: str, sizes: str) -> Machine:
    """The machine as it is, unless the options say otherwise. Raises SystemExit."""
    num_gpus = torch.cuda.device_count()
    device = device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        built = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise SystemExit(
            f"no GPU that torch {torch.__version__} can use: it is built {built} and sees"
            f" {num_gpus} GPUs{shown}. Look at"
            " nvidia-smi; `--device cpu` tries the cases without a GPU."
        )
    if device == "cpu" and backend == "nccl":
        raise SystemExit("--device cpu --backend nccl: NCCL moves memory of GPUs only")
    return Machine(
        device=device,
        backend=backend or ("nccl" if device == "cuda" else "gloo"),
        num_gpus=num_gpus if device == "cuda" else 0,
        full=(sizes or ("full" if device == "cuda" else "small")) == "full",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    titles = "\n".join(f"  {name:3} {entry.title}" for name, entry in CASES.items())
    parser.add_argument("--only", default="", help=f"names with commas between them, of\n{titles}")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="default: that of the device")
    parser.add_argument("--sizes", choices=["full", "small"], help="default: small on a CPU")
    parser.add_argument(
        "--seconds", type=float, help="for all cases; default: 480, or 1500 on a CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-test"), metavar="DIRECTORY")
    given = parser.parse_args(arguments)
    if given.seconds is not None and not 0 < given.seconds < math.inf:
        parser.error(f"--seconds {given.seconds:g}: a number above 0")
    machine = machine_of(given.device, given.backend, given.sizes)
    is_cpu = machine.device == "cpu"
    cases = chosen(given.only)
    check_free(given.out, cases)
    make_out(given.out)
    campaign = Campaign(
        machine=machine,
        out=given.out,
        seconds=given.seconds or (ON_CPU_SECONDS if is_cpu else SECONDS),
        patience=ON_CPU if is_cpu else 1.0,
        cases=cases,
    )
    # SIGTERM ends the cases' processes, like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        lines = campaign.run()
    except KeyboardInterrupt:
        print("interrupted: the cases' processes were ended", flush=True)
        return 128 + signal.SIGINT
    failed = [line["name"] for line in lines if not line["passed"]]
    print(f"{len(lines) - len(failed)} of {len(lines)} cases passed", *failed, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
