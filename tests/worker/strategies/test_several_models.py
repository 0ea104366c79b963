"""Sessions with several models and optimizers, such as a GAN's two: trained as in one process."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.late_groups import late_groups
from support.collectives.strategy_runs import difference, generation_of, use_group, weights_of
from support.members.elastic_schedule import Schedule, check_each_sample_once, lose_all
from support.members.thread_members import lone
from support.models import adversarial_pair as gan_bodies
from support.models.adversarial_pair import WAYS, Adversarial, Pair, StepCalls
from support.processes.ranks import Ranks
from support.training import elastic_bodies
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.model.local_parts import local_part
from shoal.model.several import SeveralModels, joined
from shoal.strategies import find_strategy
from shoal.strategies.rollback.script_writes import FIRST_STEPS
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, UnequalPasses

TOLERANCE = 1e-5
NUM_STEPS, BATCH = FIRST_STEPS + 2, 24


def entered(name: str) -> tuple[SynchronousStrategy, Pair, tuple[int, int]]:
    """Return a rank's strategy in a generation of all ranks, its models and optimizers, and its
    share."""
    strategy = find_strategy(name)
    assert isinstance(strategy, SynchronousStrategy)
    use_group(strategy)
    made = gan_bodies.pair()
    optimizers = {"g": made.of_generator, "d": made.of_discriminator}
    models = {"generator": made.generator, "discriminator": made.discriminator}
    shown, _ = strategy.distribute(*joined(models, optimizers))
    assert isinstance(shown, SeveralModels)
    names = [f"m{rank}" for rank in range(dist.get_world_size())]
    generation = generation_of(names, names[dist.get_rank()])
    strategy.enter(generation)
    held = Pair(shown["generator"], shown["discriminator"], *optimizers.values())
    return strategy, held, strategy.data_share(generation)


def deeds_of(strategy: SynchronousStrategy, pair: Pair, weight: float) -> StepCalls:
    """Translate calls as the session does."""
    names = {pair.of_generator: frozenset("g"), pair.of_discriminator: frozenset("d")}

    def backward(loss: Tensor, optimizer: Optimizer) -> None:
        strategy.choose(names[optimizer])
        strategy.backward(loss, weight)

    def update(optimizer: Optimizer) -> None:
        strategy.choose(names[optimizer])
        strategy.update()

    return StepCalls(backward, update)


def trained(name: str, way: str) -> dict[str, Tensor]:
    strategy, pair, share = entered(name)
    loader = Loader(gan_bodies.data(), elastic_bodies.order(BATCH))
    schedule = torch.optim.lr_scheduler.ExponentialLR(pair.of_generator, 0.99)
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, *share)
        strategy.begin_step()
        do = deeds_of(strategy, pair, batch.weight)
        gan_bodies.learn(pair, batch, way, do)
        strategy.end_step(lambda: None)
        schedule.step()
    weights = weights_of(strategy)
    strategy.close()
    return weights


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 3), ("zero1", 3), ("zero2", 2), ("fsdp", 3), ("fsdp", 1), ("ddp", 1)],
)
def test_two_models_train_as_in_one_process(strategy: str, world_size: int, way: str) -> None:
    expected = gan_bodies.one_process(way, NUM_STEPS, BATCH)
    for ours in run_in_memory(trained, world_size, strategy, way):
        assert difference(ours, expected) < TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_two_models_train_the_same_over_collectives_that_seem_done_early(
    strategy: str,
) -> None:
    """NCCL's collectives seem done before their results are there."""
    expected = run_in_memory(trained, 2, strategy, WAYS[0])
    with late_groups():
        late = run_in_memory(trained, 2, strategy, WAYS[0])
    for ours, theirs in zip(late, expected, strict=True):
        assert difference(ours, theirs) == 0


def _undone(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before a step in which one model is updated, and after the step was
    withdrawn: a step that begins without a copy of all weights."""
    strategy, pair, share = entered(name)
    loader = Loader(gan_bodies.data(), elastic_bodies.order(BATCH))
    before: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, *share)
        before = weights_of(strategy)
        strategy.begin_step()
        do = deeds_of(strategy, pair, batch.weight)
        gan_bodies.learn(pair, batch, "in turn", do)
        if step < NUM_STEPS - 1:
            strategy.end_step(lambda: None)
    momentum = _momentum(pair.of_discriminator)
    strategy.withdraw_step()
    undone = zip(momentum, _momentum(pair.of_discriminator), strict=True)
    assert any(not torch.equal(one, other) for one, other in undone)
    behind = weights_of(strategy)
    strategy.close()
    return before, behind


def _undone_writes(name: str, write: str) -> bool:
    """True if momentum is as before a withdrawn step, in which the script had written to it before
    or after an update of one optimizer."""
    strategy, pair, share = entered(name)
    loader = Loader(gan_bodies.data(), elastic_bodies.order(BATCH))
    optimizers = [pair.of_discriminator, pair.of_generator]

    def decay() -> None:
        for state in [state for each in optimizers for state in each.state.values()]:
            for key, value in list(state.items()):
                if write == "replace":
                    state[key] = value * 0.5
                else:
                    value.mul_(0.5)

    for step in range(NUM_STEPS):
        before = _state_of(optimizers)
        strategy.begin_step()
        do = deeds_of(strategy, pair, loader.synchronous(step, *share).weight)
        # The first write comes when peers have their copies: nothing was known of it before.
        is_early = step > 1 and write != "behind"
        if is_early:
            decay()
        gan_bodies.learn(pair, loader.synchronous(step, *share), "in turn", do)
        if step and not is_early:
            decay()
        if step < NUM_STEPS - 1:
            strategy.end_step(lambda: None)
    strategy.withdraw_step()  # raises StateLost unless it can undo the writes
    behind = _state_of(optimizers)
    strategy.close()
    return len(before) > 3 and all(map(torch.equal, before, behind))


@pytest.mark.parametrize("write", ["in place", "replace", "behind"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_writes_to_state_are_undone_with_the_step_of_an_update(strategy: str, write: str) -> None:
    """Regression: writes in place before an update left a member without state."""
    assert run_in_memory(_undone_writes, 2, strategy, write) == [True, True]


def _state_of(optimizers: list[Optimizer]) -> list[Tensor]:
    states = [state for each in optimizers for state in each.state.values()]
    return [local_part(value).clone() for state in states for value in state.values()]


def _momentum(optimizer: Optimizer) -> list[Tensor]:
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [(b.to_local() if hasattr(b, "to_local") else b).clone() for b in buffers]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_an_update_within_a_step_is_undone_with_it(strategy: str) -> None:
    for before, behind in run_in_memory(_undone, 2, strategy):
        assert before.keys() == behind.keys()
        assert all(torch.equal(before[key], behind[key]) for key in before)


def _told(name: str) -> str:
    """Return the error of a rank that trains another model than the others."""
    strategy, pair, share = entered(name)
    batch = Loader(gan_bodies.data(), elastic_bodies.order(BATCH)).synchronous(0, *share)
    strategy.begin_step()
    do = deeds_of(strategy, pair, batch.weight)
    fake = pair.generator(batch.inputs)
    loss = pair.discriminator(fake).mean()
    try:
        do.backward(loss, pair.of_generator if dist.get_rank() else pair.of_discriminator)
    except UnequalPasses as error:
        dist.barrier()
        return str(error)
    finally:
        strategy.close()
    raise AssertionError("both passes were made")


def test_members_that_train_different_models_are_refused() -> None:
    """The error comes before anything of a gradient is sent."""
    errors = run_in_memory(_told, 2, "ddp")
    assert len(set(errors)) == 1
    assert "a backward pass for d by m0; a backward pass for g by m1" in errors[0]


def adversarial(cluster: LocalCluster, strategy: str, **changes: Any) -> Adversarial:
    return Adversarial(
        coordinator=cluster.coordinator,
        job=f"gan-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy,
        **{"desired_members": 3, "batch_size": 24, **changes},
    )


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("ddp", "in turn"),
        pytest.param("zero1", "in turn", marks=pytest.mark.long),
        pytest.param("fsdp", "in turn", marks=pytest.mark.long),
        pytest.param("hsdp", "at once", marks=pytest.mark.nightly),
        pytest.param("ddp", "by step", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_and_a_join_leave_no_trace_in_either_model(
    cluster: LocalCluster, tmp_path: Path, strategy: str, way: str
) -> None:
    options = {"shard": 2} if strategy == "hsdp" else {}
    run = adversarial(cluster, strategy, way=way, options=options)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=gan_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        check_as_one_process(schedule, run)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_both_models_continue_from_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    options = {"shard": 2} if strategy == "hsdp" else {}
    run = adversarial(cluster, strategy, checkpoints=str(tmp_path / "checkpoints"), options=options)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=6, body=gan_bodies.train)
        schedule.start(3)
        step = lose_all(schedule, Path(run.checkpoints), 2)
        again = Schedule(ranks, run, tmp_path, seed=7, body=gan_bodies.train)
        again.start(3)
        first = next(d for kind, d in again.all[0].seen if kind == "tried")
        assert first["step"] >= step
        finished = again.finish()
        compare(finished, run)


def check_as_one_process(schedule: Schedule, run: Adversarial) -> None:
    finished = schedule.finish()
    compare(finished, run)
    for rank in schedule.all:
        rank.drain()
    check_each_sample_once(schedule.all, finished["step"], elastic_bodies.order(run.batch_size))


def compare(finished: Any, run: Adversarial) -> None:
    expected = gan_bodies.one_process(run.way, finished["step"], run.batch_size)
    own = {name: torch.tensor(weights) for name, weights in finished["weights"].items()}
    assert difference(own, expected) < TOLERANCE


# --- refusals ---


def one() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(5, 7)
    return model, SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "hybrid", "local-sgd", "async-sgd"])
def test_strategies_that_train_one_model_refuse_several(
    cluster: LocalCluster, strategy: str
) -> None:
    pairs = [one(), one()]
    models, optimizers = [m for m, _ in pairs], [o for _, o in pairs]
    refused = pytest.raises(InvalidSpec, match=f"strategy {strategy} trains one model.*ddp, zero1")
    with lone(cluster) as session, refused:
        session.distribute(models, optimizers, strategy=strategy)


def _shared_layer() -> tuple[Any, Any]:
    layer = nn.Linear(3, 3)
    models = [nn.Sequential(layer), nn.Sequential(layer)]
    return models, [SGD(models[0].parameters(), lr=0.1)]


def _shared_parameter() -> tuple[Any, Any]:
    model, optimizer = one()
    return [model], [optimizer, SGD(model.parameters(), lr=0.2)]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (_shared_layer, "two models share a parameter.*0.0.weight and 1.0.weight"),
        (_shared_parameter, "two optimizers hold the same parameter.*'0' and '1'"),
        (lambda: ([], [one()[1]]), "the number of models is out of range.*saw 0"),
        (lambda: ({"a.b": one()[0]}, [one()[1]]), "a name that no model can have.*'a.b'"),
        (lambda: ([one()[0]], [one()[1]]), "a parameter that is not the model's"),
    ],
    ids=["shared layer", "shared parameter", "none", "name", "not the model's"],
)
def test_models_that_cannot_be_trained_separately_are_refused(
    cluster: LocalCluster, made: Callable[[], tuple[Any, Any]], words: str
) -> None:
    models, optimizers = made()
    with lone(cluster) as session, pytest.raises(InvalidSpec, match=words):
        session.distribute(models, optimizers)


def test_ambiguous_calls_with_several_optimizers_are_refused_and_train_nothing(
    cluster: LocalCluster,
) -> None:
    """Tested in a step of both models, and in one of a model that two optimizers train."""
    pair, (other, of_other) = gan_bodies.pair(), one()
    bias = SGD([pair.discriminator[0].bias], lr=0.1)
    rest = [p for p in pair.discriminator.parameters() if p is not pair.discriminator[0].bias]
    weights = SGD(rest, lr=0.1)
    with lone(cluster) as session:
        (g, d), (of_g, of_d, of_bias) = session.distribute(
            (pair.generator, pair.discriminator), (pair.of_generator, weights, bias)
        )
        for batch in session.batches(gan_bodies.data(), global_batch_size=60):
            with session.step():
                loss = d(g(batch.inputs)).mean()
                with pytest.raises(InvalidSpec, match=r"backward does not say.*3 optimizers"):
                    session.backward(loss)
                with pytest.raises(InvalidSpec, match="optimizer that is not the session's"):
                    session.backward(loss, optimizer=of_other)
                with pytest.raises(InvalidSpec, match="'1' is trained by other optimizers"):
                    session.backward(loss, optimizer=of_d)
                with pytest.raises(InvalidSpec, match="update of an optimizer that has no grad"):
                    session.update(of_g)
                with pytest.raises(InvalidSpec, match="with several optimizers"):
                    session.backward(loss, optimizer=of_g, weight=3)
                with pytest.raises(InvalidSpec, match=r"session\.forward_backward with several"):
                    session.forward_backward(batch, lambda outputs, targets: outputs.mean())
                with pytest.raises(InvalidSpec, match=r"called optimizer\.step"):
                    of_g.step()
                loss = d(g(batch.inputs)).mean()
                session.backward(loss, optimizer=[of_d, of_bias])
                norm = session.clip_grad_norm(0.5, optimizer=[of_d, of_bias])
                assert norm > 0
        assert torch.equal(dict(session.state_dict())["0.0.weight"], pair.generator[0].weight)
    of_other.step()
    assert other.weight.grad is None
