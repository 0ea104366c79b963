"""`shoal.distribute` without a session: an ordinary loop on ranks that never change, and the end of
its processes."""

import os
import socket
import subprocess
import sys
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
