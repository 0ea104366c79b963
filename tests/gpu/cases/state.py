"""State that outlives members: checkpoints, and parameter servers."""

import signal
import time
from pathlib import Path
from statistics import mean, median

from gpu.case import Case, Crew, crew_of
from gpu.member import Fault
from gpu.models import chain_of, chains


def checkpoints(case: Case) -> None:
    """Members are killed while a checkpoint is written: a new member resumes from the newest
    complete one, bit for bit."""
    folder = case.directory / "kept"
    plan = case.plan(
        "checkpoints",
        chain_of(150_000_000 if case.machine.full else 4_000_000, optimizer="adamw"),
        checkpoints=str(folder),
        pace_s=0.02,
    )
    with crew_of(case, plan) as crew:
        for name in ("m0", "m1"):
            crew.start(name)
        reached = crew.trains("m0", world_size=2)["step"]
        for name in ("m0", "m1"):
            crew.trains(name, after_step=reached + 16)
        amid = _kill_amid_a_write(case, crew, folder)
        held = {each["step"]: each["digest"] for each in crew.steps("m0", "holds")}
        by_due: dict[bool, list[float]] = {True: [], False: []}
        for step in crew.steps("m0")[6:]:
            by_due[(step["step"] + 1) % 5 == 0].append(step["at_s"] - step["begun_s"])
        case.figures["killed_amid_a_write"] = amid
        stall_ms = 1e3 * (median(by_due[True]) - median(by_due[False]))
        case.on_gpu_only("stall_of_a_checkpoint_ms", round(stall_ms, 1))
        crew.start("m2", stop_file=str(folder))
        resumed = crew.expect("m2", "holds")
        case.figures["resumed_step"] = resumed["step"]
        assert resumed["step"] > 0, "it began with step 0"
        assert resumed["digest"] == held[resumed["step"]], "other weights than were trained"
        crew.finish("m2")


def _kill_amid_a_write(case: Case, crew: Crew, folder: Path) -> bool:
    """Kill both members once a checkpoint is begun; return True if it was incomplete then."""
    deadline_s = time.monotonic() + case.patience_s
    while not (begun := list(folder.glob(".step-*.partial"))):
        assert time.monotonic() < deadline_s, "no checkpoint is being written"
    for name in ("m0", "m1"):
        crew.members[name].send_signal(signal.SIGKILL)
    for name in ("m0", "m1"):
        crew.members[name].join()
        crew.members[name].drain()
    return any(path.exists() for path in begun)


def asynchronous(case: Case) -> None:
    """One of two workers is killed, with two parameter servers; the loss continues to fall."""
    stop_file = case.directory / "stop"
    for strategy in ("async-sgd", "ssp"):
        plan = case.plan(
            f"of-{strategy}",
            chains(1024 if case.machine.full else 24, optimizer="fast sgd"),
            strategy=strategy,
            stop_file=str(stop_file),
        )
        stop_file.unlink(missing_ok=True)
        with crew_of(case, plan, num_servers=2) as crew:
            crew.start_all(2, {"m1": Fault(place="backward", step=20)})
            crew.expect("m1", "struck")
            for _ in range(40):
                crew.expect("m0", "committed")
            stop_file.touch()
            crew.finish("m0")
            steps = crew.steps("m0")
            losses = [step["loss"] for step in steps]
            case.figures[f"{strategy}_losses"] = [round(losses[0], 3), round(losses[-1], 3)]
            assert mean(losses[-10:]) < 0.9 * mean(losses[:5]), (
                f"{strategy}: the loss does not fall"
            )
            times = [step["at_s"] - step["begun_s"] for step in steps]
            milliseconds = round(1e3 * median(times), 2)
            case.on_gpu_only(f"{strategy}_step_ms", milliseconds)
