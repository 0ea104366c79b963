"""`shoal.distribute` without a session: an ordinary loop on ranks that never change, and the end of
its processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.data.order import range_of_rank
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec, ShoalError, UnknownStrategy

TOLERANCE = 1e-5
NUM_STEPS, BATCH = 12, 24
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_torchrun.py"
ENDING = Path(__file__).parents[2] / "support" / "collectives" / "fixed_ranks_ending.py"
CODES = {"line": 0, "destroy": 0, "error": 1, "exit": 3}
"""The script's own exit code by the way in which it ends."""


def new_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        *(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh()),
        *(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)),
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(NUM_STEPS * BATCH, 9, generator=generator)
    return inputs, torch.randint(0, 3, (len(inputs),), generator=generator)


def one_process(max_norm: float) -> dict[str, Tensor]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = data()
    for step in range(NUM_STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(model: nn.Module, strategy: str | Strategy, max_norm: float) -> dict[str, Tensor]:
    """Train as in one process, except for the lines that call `shoal`."""
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = shoal.distribute(model, optimizer, strategy)
    index, count = shoal.data_share(model)
    inputs, targets = data()
    for step in range(NUM_STEPS):
        start, stop = range_of_rank(step * BATCH, (step + 1) * BATCH, index, count)
        part = slice(start, stop)
        if strategy == "pipeline":
            shoal.forward_backward(model, inputs[part], targets[part], nn.functional.cross_entropy)
        else:
            nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        shoal.clip_grad_norm(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(shoal.state_dict(model))


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "pipeline", "hybrid")


@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_ordinary_loop_trains_as_one_process(strategy: str, world_size: int) -> None:
    """Clipping takes effect; its norm is that of the whole model under every strategy."""
    if strategy == "hybrid" and world_size == 3:
        pytest.skip("24 samples on a mesh of 3 are tested with the layout")
    max_norm = 0.05
    expected = one_process(max_norm)
    models = [new_model() for _ in range(world_size)]

    def body() -> dict[str, Tensor]:
        return train(models[torch.distributed.get_rank()], strategy, max_norm)

    for own in shoal.run_in_memory(body, world_size):
        assert set(own) == set(expected)
        for name, tensor in own.items():
            assert float((tensor - expected[name]).abs().max()) < TOLERANCE, name


def with_dropped_passes(
    model: Any, optimizer: Any, part: Callable[[slice], slice], *, clip: Callable[[], object]
) -> None:
    """Drop the gradients of every other pass, as a loop that leaves out steps with large gradients
    does."""
    inputs, targets = data()
    for step in range(NUM_STEPS):
        own = part(slice(step * BATCH, (step + 1) * BATCH))
        nn.functional.cross_entropy(model(inputs[own]), targets[own]).backward()
        if step % 4:
            clip()
        if step % 2:
            optimizer.step()
        (model if step % 3 else optimizer).zero_grad()


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "pipeline"])
def test_gradients_that_the_loop_drops_leave_no_trace(strategy: str) -> None:
    """Regression: ranks kept gradients of parameters that others step, and did not reduce the next
    ones after a step that was left out."""
    plain = new_model()
    with_dropped_passes(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        lambda whole: whole,
        clip=lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.05),
    )
    models = [new_model() for _ in range(2)]

    def body() -> dict[str, Tensor]:
        model: Any = models[torch.distributed.get_rank()]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = shoal.distribute(model, optimizer, strategy)

        def part(whole: slice) -> slice:
            return slice(*range_of_rank(whole.start, whole.stop, *shoal.data_share(model)))

        with_dropped_passes(model, optimizer, part, clip=lambda: shoal.clip_grad_norm(model, 0.05))
        return dict(shoal.state_dict(model))

    for own in shoal.run_in_memory(body, 2):
        for name, tensor in plain.state_dict().items():
            assert float((own[name] - tensor).abs().max()) < TOLERANCE, name


def scaled(model: Any, optimizer: Any, part: slice, *, clip: Callable[[], object]) -> float:
    """Train with a GradScaler, whose first steps overflow; return its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    inputs, targets = data()
    for step in range(NUM_STEPS):
        own = slice(step * BATCH + part.start, step * BATCH + part.stop)
        loss = nn.functional.cross_entropy(model(inputs[own]), targets[own])
        scaler.scale(loss * 8).backward()
        scaler.unscale_(optimizer)
        clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return float(scaler.get_scale())


@pytest.mark.parametrize(
    ("strategy", "world_size"), [("ddp", 1), ("ddp", 2), ("zero1", 1), ("fsdp", 1), ("tensor", 1)]
)
def test_a_grad_scaler_skips_the_same_steps_on_all_ranks(strategy: str, world_size: int) -> None:
    """Regression: an overflow ended the job."""
    plain = new_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scale = scaled(
        plain,
        optimizer,
        slice(0, BATCH),
        clip=lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.05),
    )
    assert scale < 2.0**127
    models = [new_model() for _ in range(world_size)]

    def body() -> tuple[float, dict[str, Tensor]]:
        model: Any = models[torch.distributed.get_rank()]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = shoal.distribute(model, optimizer, strategy)
        part = slice(*range_of_rank(0, BATCH, *shoal.data_share(model)))
        own = scaled(model, optimizer, part, clip=lambda: shoal.clip_grad_norm(model, 0.05))
        return own, dict(shoal.state_dict(model))

    for own_scale, own in shoal.run_in_memory(body, world_size):
        assert own_scale == scale
        for name, tensor in plain.state_dict().items():
            assert float((own[name] - tensor).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tensor"])
def test_a_grad_scaler_is_refused_if_ranks_have_parts_of_the_gradients(strategy: str) -> None:
    """Ranks would skip different steps. A scaler that is switched off changes nothing."""
    models = [new_model() for _ in range(2)]

    def body() -> None:
        model: Any = models[torch.distributed.get_rank()]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = shoal.distribute(model, optimizer, strategy)
        for enabled in (False, True):
            scaler = torch.amp.GradScaler("cpu", enabled=enabled)
            scaler.scale(model(data()[0][:BATCH]).sum()).backward()
            scaler.step(optimizer)

    with pytest.raises(InvalidSpec, match=r"a GradScaler.*bfloat16"):
        shoal.run_in_memory(body, 2)


@pytest.mark.parametrize(
    ("strategy", "error"), [("async-sgd", InvalidSpec), ("no-such", UnknownStrategy)]
)
def test_strategies_that_need_a_session_and_unknown_ones_are_refused(
    strategy: str, error: type[ShoalError]
) -> None:
    def body() -> Any:
        model = new_model()
        return shoal.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)

    with pytest.raises(error):
        shoal.run_in_memory(body, 1)


def test_a_model_that_was_not_distributed_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"shoal\.distribute"):
        shoal.data_share(new_model())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_example_runs_under_torchrun(strategy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", str(port), str(EXAMPLE), strategy),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def ended(strategy: str, end: str, flag: Path) -> list[tuple[int, str]]:
    """Return exit code and output of both ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ENDING), strategy, str(flag), end],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "end"),
    [
        *(("zero1", end) for end in CODES),
        *((strategy, "destroy") for strategy in ("ddp", "fsdp", "tensor", "pipeline")),
    ],
)
def test_no_thread_of_gloo_outlives_the_interpreter(
    tmp_path: Path, strategy: str, end: str
) -> None:
    """A thread that frees a tensor meanwhile would end the process by SIGABRT."""
    first, second = ended(strategy, end, tmp_path / "flag")
    assert "freed by gloo" in first[1], first[1]
    for code, output in (first, second):
        assert code == CODES[end], output
        assert output.splitlines()[-1] == "left 0", output
