"""Members killed or stopped at points that are hard for NCCL; the others continue exactly."""

import signal

from gpu.case import Case, crew_of
from gpu.member import Fault
from gpu.models import chain_of, chains

import shoal_proto.errors

RESUMED_S = 2.0
"""Time from a kill to the next step of all survivors."""
IN_BRING_UP_S = 30.0
CUT_S = 2.0


def in_backward(case: Case) -> None:
    """A member of four, three and two is killed while 150 MB of gradients are in transit."""
    task = chain_of(150_000_000 if case.machine.full else 100_000)
    plan = case.plan("backward", task, num_steps=24)
    steps_of_faults = {"m2": 6, "m3": 12, "m1": 18}
    faults = {name: Fault(place="backward", step=at) for name, at in steps_of_faults.items()}
    with crew_of(case, plan) as crew:
        crew.start_all(4, faults)
        struck = {name: crew.expect(name, "struck") for name in faults}
        crew.finish("m0")
        crew.check_each_step_once("m0")
        case.figures["difference"] = float(f"{crew.check_as_alone(['m0']):.2g}")
        for name, at in struck.items():
            others = ["m0", *(n for n in faults if steps_of_faults[n] > steps_of_faults[name])]
            for other in others[1:]:
                crew.members[other].drain()
            case.figures[f"resumed_{name}_s"] = crew.resumed_s(others, at)
        case.figures["longest_cut_s"] = crew.longest_cut_s("m0")
    if case.machine.device == "cuda":
        first = case.figures["resumed_m2_s"]
        assert first <= RESUMED_S, f"{first} s from a kill to the next step of three survivors"


def in_bring_up(case: Case) -> None:
    """Kill a member before the group of its generation is made, and another while it is made."""
    plan = case.plan("bring-up", chains(24), num_steps=8)
    faults = {"m3": Fault(place="before the group"), "m2": Fault(place="within the group")}
    with crew_of(case, plan) as crew:
        crew.start_all(4, faults)
        crew.expect("m3", "struck")
        struck = crew.expect("m2", "struck")
        crew.finish("m0", "m1")
        seconds = crew.resumed_s(["m0", "m1"], struck)
        case.figures["resumed_s"] = seconds
        assert seconds < IN_BRING_UP_S, f"{seconds} s from the kill in a bring-up to a step"
        crew.check_as_alone(["m0", "m1"])


def stopped(case: Case) -> None:
    """Stop one of three members, then continue it: it comes back, or leaves with an error of
    Shoal."""
    stop_file = case.directory / "stop"
    plan = case.plan("stopped", chains(24), stop_file=str(stop_file), pace_s=0.02)
    fault = Fault(place="backward", step=6, number=signal.SIGSTOP)
    with crew_of(case, plan) as crew:
        crew.start_all(3, {"m1": fault})
        struck = crew.expect("m1", "struck")
        reached = crew.trains("m0", world_size=2)["step"]
        crew.trains("m2", world_size=2)
        case.figures["resumed_s"] = crew.resumed_s(["m0", "m2"], struck)
        # Wait for longer than the limits of torch's own watchdogs.
        crew.trains("m0", after_step=reached + (500 if case.machine.full else 50))
        crew.members["m1"].send_signal(signal.SIGCONT)
        kind, data = crew.members["m1"].expect_any("committed", "raised", timeout_s=case.patience_s)
        if kind == "raised":
            found = getattr(shoal_proto.errors, data["error"], None)
            assert found is not None, f"it left with {data['error']}: {data['trace']}"
        case.figures["came_back"] = kind == "committed"
        case.figures["left_with"] = data.get("error", "")
        stop_file.touch()
        names = ["m0", "m2", *(["m1"] if kind == "committed" else [])]
        crew.finish(*names)
        crew.check_as_alone(names)


def stopped_hsdp(case: Case) -> None:
    """Two communicators hang at once: none is aborted late because of the other."""
    plan = case.plan(
        "stopped-hsdp",
        chains(256 if case.machine.full else 24),
        strategy="hsdp",
        options={"shard": 2, "min_group_bytes": 200},
        num_steps=16,
    )
    fault = Fault(place="backward", step=6, number=signal.SIGSTOP)
    names = ["m0", "m1", "m2"]
    with crew_of(case, plan) as crew:
        crew.start_all(4, {"m3": fault})
        struck = crew.expect("m3", "struck")
        crew.finish(*names)
        case.figures["resumed_s"] = crew.resumed_s(names, struck)
        case.figures["longest_cut_s"] = crew.longest_cut_s(*names)
        case.figures["difference"] = float(f"{crew.check_as_alone(names):.2g}")
    if case.machine.device == "cuda":
        assert case.figures["longest_cut_s"] < CUT_S, "a cut waited for a collective's limit"


def from_copies(case: Case) -> None:
    """A killed member's part of the state is at a peer; the part is lost if two neighbours are
    killed."""
    task = chain_of(100_000_000 if case.machine.full else 100_000, optimizer="adamw")
    plan = case.plan("copies", task, strategy="fsdp", num_steps=40, pace_s=0.01)
    fault = Fault(place="backward", step=25)
    names = ["m0", "m1", "m3"]
    with crew_of(case, plan) as crew:
        crew.start_all(4, {"m2": fault})
        struck = crew.expect("m2", "struck")
        crew.finish(*names)
        case.figures["resumed_s"] = crew.resumed_s(names, struck)
        case.figures["difference"] = float(f"{crew.check_as_alone(names):.2g}")
        steps = [step["step"] for step in crew.steps("m0")]
        redone = len(steps) - len(set(steps))
        case.figures["steps_redone"] = redone
        assert redone <= 20, f"{redone} steps were trained again"
    plan = case.plan("neighbours", task, strategy="fsdp", num_steps=40, pace_s=0.01)
    with crew_of(case, plan) as crew:
        crew.start_all(4, {"m1": fault, "m2": fault})
        for name in ("m0", "m3"):
            error = crew.expect(name, "raised")
            assert error["error"] == "StateLost", error["trace"]


def in_exchange(case: Case) -> None:
    """Kill one of three members while a round's weights are sent: the round is repeated, or was
    completed by all. A round is one step here, so the weights are those of one process."""
    task = chains(256 if case.machine.full else 24, optimizer="sgd")
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False}
    for strategy, options in (("local-sgd", {}), ("diloco", plain)):
        plan = case.plan(
            f"round-{strategy}",
            task,
            strategy=strategy,
            options={"every_steps": 1, **options},
            num_steps=12,
        )
        with crew_of(case, plan) as crew:
            crew.start_all(3, {"m2": Fault(place="exchange", step=5)})
            struck = crew.expect("m2", "struck")
            crew.finish("m0", "m1")
            case.figures[f"{strategy}_resumed_s"] = crew.resumed_s(["m0", "m1"], struck)
            found = crew.check_as_alone(["m0", "m1"])
            case.figures[f"{strategy}_difference"] = float(f"{found:.2g}")
