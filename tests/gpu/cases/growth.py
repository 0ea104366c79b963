"""Memory, threads and descriptors of a process after many generations."""

import signal
from pathlib import Path

from gpu.case import Case, Crew, crew_of
from gpu.models import chains

FIRST = 10
MOST = {"device_mb": 50.0, "threads": 5.0, "descriptors": 10.0, "rss_mb": 150.0}
"""Growth between the tenth generation and the last."""


def over_generations(case: Case) -> None:
    """A second member joins and leaves, killed and drained in turn; the first one stays."""
    num_generations = 50 if case.machine.full else 30
    stop_file, look_file = case.directory / "stop", case.directory / "look"
    plan = case.plan(
        "growth",
        chains(64),
        stop_file=str(stop_file),
        pace_s=0.005,
        min_members=1,
        desired_members=1,
        max_members=2,
    )
    with crew_of(case, plan) as crew:
        crew.start("m0", look_file=str(look_file))
        number = crew.trains("m0")["generation"]
        looks = []
        cycle = 0
        while number < num_generations:
            cycle += 1
            number = _come_and_go(crew, f"m{cycle}", killed=cycle % 2 == 1)
            if number >= FIRST + 10 * len(looks):
                looks.append(_look(crew, look_file))
        stop_file.touch()
        crew.finish("m0")
    case.figures["generations"] = number
    for name, most in MOST.items():
        if name == "device_mb" and case.machine.device != "cuda":
            case.left_out.append("device_mb_growth")
            continue
        values = [round(look[name], 1) for look in looks]
        case.figures[name] = values
        assert values[-1] - values[0] < most, f"{name} grows with generations: {values}"


def _come_and_go(crew: Crew, name: str, *, killed: bool) -> int:
    """Let a member join, train and leave; return the generation in which the first member is
    alone."""
    crew.start(name)
    crew.trains("m0", world_size=2)
    crew.members[name].send_signal(signal.SIGKILL if killed else signal.SIGTERM)
    # The GPU holds nothing of a process that has ended.
    crew.members[name].join()
    generation: int = crew.trains("m0", world_size=1)["generation"]
    return generation


def _look(crew: Crew, look_file: Path) -> dict[str, float]:
    look_file.touch()
    return crew.expect("m0", "looks")
