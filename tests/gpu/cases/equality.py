"""Strategies train to the weights of one process, also with a scaler, compiled, or offloaded."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from gpu.case import EXACT, Case, Crew, crew_of, weights_of
from gpu.member import Fault, train_each
from gpu.models import chains, residual
from gpu.models import tied as tied_task
from support.collectives.strategy_runs import difference
from support.processes.ranks import Ranks

STEPS = 12
COMPRESSED = 2e-2
STRATEGIES: Mapping[str, tuple[str, Mapping[str, Any], str, float]] = {
    "ddp": ("ddp", {}, "momentum", EXACT),
    "zero1": ("zero1", {}, "adamw", EXACT),
    "zero2": ("zero2", {}, "momentum", EXACT),
    "fsdp": ("fsdp", {"min_group_bytes": 200}, "adamw", EXACT),
    "hsdp": ("hsdp", {"shard": 2, "min_group_bytes": 200}, "momentum", EXACT),
    "tensor": ("tensor", {"min_split_bytes": 0}, "momentum", EXACT),
    "fsdp-tensor": ("fsdp-tensor", {"tensor": 2, "min_split_bytes": 0}, "momentum", EXACT),
    "pipeline": ("pipeline", {}, "momentum", EXACT),
    "hybrid": ("hybrid", {"min_split_bytes": 0}, "momentum", EXACT),
    # These are exact, too, if a round is one step and the outer step takes the average as it is.
    "local-sgd": ("local-sgd", {"every_steps": 1}, "sgd", EXACT),
    "diloco": (
        "diloco",
        {"every_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False},
        "sgd",
        EXACT,
    ),
    "ddp-fp16": ("ddp", {"compression": "fp16"}, "momentum", COMPRESSED),
    "ddp-int8": ("ddp", {"compression": "int8"}, "momentum", COMPRESSED),
    "ddp-powersgd": ("ddp", {"compression": "powersgd"}, "momentum", COMPRESSED),
}
STRATEGY_S = 25.0
"""Limit of one strategy; the others continue after it."""


def of_one(case: Case) -> None:
    _every_strategy(case, 1)


def of_two(case: Case) -> None:
    _every_strategy(case, 2)


def of_four(case: Case) -> None:
    _every_strategy(case, 4)


def _every_strategy(case: Case, world_size: int) -> None:
    """Run a job for each strategy in the same processes, and in new processes after one that
    fails."""
    task = chains(256 if case.machine.full else 24)
    plans = {
        name: case.plan(
            f"e{world_size}-{name}",
            replace(task, optimizer=optimizer),
            strategy=strategy,
            options=options,
            num_steps=STEPS,
            desired_members=world_size,
        )
        for name, (strategy, options, optimizer, _) in STRATEGIES.items()
    }
    failed: dict[str, str] = {}

    @cache
    def expected(optimizer: str, num_steps: int) -> dict[str, torch.Tensor]:
        job = f"{optimizer}-{num_steps}"
        return case.alone(case.plan(job, replace(task, optimizer=optimizer)), num_steps)

    with case.cluster() as cluster:
        left = {name: replace(p, coordinator=cluster.coordinator) for name, p in plans.items()}
        while left:
            with Ranks() as ranks:
                started = [
                    ranks.start(
                        train_each,
                        tuple(replace(p, member_id=f"m{i}", index=i) for p in left.values()),
                    )
                    for i in range(world_size)
                ]
                for name in list(left):
                    del left[name]
                    optimizer, tolerance = STRATEGIES[name][2:]
                    try:
                        limit_s = STRATEGY_S if case.machine.device == "cuda" else case.patience_s
                        ends = [rank.expect("finished", limit_s) for rank in started]
                    except AssertionError as error:
                        failed[name] = str(error)[-1500:]
                        break
                    found = max(
                        difference(weights_of(end), expected(optimizer, end["step"]))
                        for end in ends
                    )
                    case.figures[name] = float(f"{found:.2g}")
                    if found >= tolerance:
                        failed[name] = f"{found:.3g} from the weights of one process"
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())


def tied(case: Case) -> None:
    """Two stages exchange the gradient of a shared weight of 150 MB: more than NCCL buffers."""
    task = tied_task(50304, 768) if case.machine.full else tied_task(512, 32)
    plan = case.plan("tied", task, strategy="pipeline", options={"copies": 0}, num_steps=3)
    with crew_of(case, plan) as crew:
        crew.start_all(2)
        crew.finish("m0", "m1")
        case.figures["difference"] = float(f"{crew.check_as_alone(['m0', 'm1']):.2g}")
        first, *_, last = crew.steps("m0")
        case.on_gpu_only("step_s", round((last["at_s"] - first["at_s"]) / 2, 3))


INFINITE_STEP = 5


def infinite(case: Case) -> None:
    """The Inf of one member reaches the scaler: all members skip the step, and have the same
    scale."""
    task = chains(512 if case.machine.full else 24)
    for strategy in ("ddp", "fsdp"):
        plan = case.plan(f"amp-{strategy}", task, strategy=strategy, amp=True, num_steps=10)
        with crew_of(case, plan) as crew:
            crew.start("m0", desired_members=2)
            crew.start("m1", desired_members=2, infinite_step=INFINITE_STEP)
            crew.finish("m0", "m1")
            crew.check_alike(["m0", "m1"])
            for name in ("m0", "m1"):
                steps = {step["step"]: step for step in crew.steps(name)}
                before, at, after = (steps[INFINITE_STEP + number] for number in (-1, 0, 1))
                assert at["scale"] == before["scale"] / 2, (name, before["scale"], at["scale"])
                assert at["sum"] == before["sum"], f"{name} has taken the step with an Inf"
                assert after["sum"] != at["sum"], f"{name} has taken no step since"
                case.figures[f"{strategy}_scale"] = at["scale"]


def compiled(case: Case) -> None:
    """A member is replaced in mid-training: nothing is compiled again, and the weights are those of
    eager mode."""
    backend = "inductor" if case.machine.device == "cuda" else "eager"
    width = 256 if case.machine.full else 24
    for strategy, dropout in (("ddp", 0.0), ("fsdp", 0.0), ("ddp", 0.2)):
        job = f"compiled-{strategy}" + ("-dropout" if dropout else "")
        plan = case.plan(
            job,
            residual(width, dropout),
            strategy=strategy,
            compiled=backend,
            num_steps=16,
            min_members=2,
            desired_members=2,
            max_members=2,
        )
        with crew_of(case, plan) as crew:
            crew.start("m0")
            crew.start("m1", fault=Fault(place="backward", step=8))
            crew.expect("m1", "struck")
            crew.start("m2")
            crew.finish("m0", "m2")
            _check_compiled(case, crew, job, has_dropout=bool(dropout))


def _check_compiled(case: Case, crew: Crew, job: str, *, has_dropout: bool) -> None:
    steps = crew.steps("m0")
    before = [step["graphs"] for step in steps if step["step"] == 7]
    case.figures[f"{job}_graphs"] = steps[-1]["graphs"]
    assert before[-1] > 0, f"nothing was compiled: {job}"
    assert steps[-1]["graphs"] == before[-1], f"a change has compiled the model again: {job}"
    if has_dropout:
        crew.check_alike(["m0", "m2"])
    else:
        crew.check_as_alone(["m0", "m2"], 1e-4)


def offloaded(case: Case) -> None:
    """Layers compute in bf16, and parameters on the host stay pinned after a change of members."""
    task = chains(512 if case.machine.full else 24)
    plan = case.plan(
        "offloaded",
        task,
        strategy="fsdp",
        options={"cpu_offload": True, "param_dtype": "bf16", "reduce_dtype": "fp32"},
        num_steps=16,
    )
    with crew_of(case, plan) as crew:
        crew.start_all(3, {"m2": Fault(place="backward", step=8)})
        ends = crew.finish("m0", "m1")
        case.figures["difference"] = float(f"{crew.check_as_alone(['m0', 'm1'], 1e-2):.2g}")
        case.on_gpu_only("pinned", all(end["pinned"] for end in ends))
        assert case.figures.get("pinned", True), "parameters on the host are not pinned any more"
