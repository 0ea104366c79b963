"""DDP over losses and joins: real members, a real coordinator, real signals.

In every case, the final weights are those of one process and each sample counts once an epoch.
"""

import random
import re
import secrets
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.members.held_members import HeldMembers
from support.processes.ranks import Rank, Ranks
from support.training import rank_bodies
from support.training.rank_bodies import EPOCHS, NUM_SAMPLES, NUM_STEPS, Run

from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal_client.local.cluster import LocalCluster

TOLERANCE = 1e-5
"""Limit for fp32 after 20 steps; only the order of additions differs."""


def run_of(cluster: LocalCluster, job: str, **changes: object) -> Run:
    run = Run(
        coordinator=cluster.coordinator, job=job, member_id="", min_members=1, desired_members=3
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def start(ranks: Ranks, run: Run, names: str) -> list[Rank]:
    return [ranks.start(rank_bodies.train, replace(run, member_id=name)) for name in names]


def one_process(batch_size: int, source: str, epochs: int = EPOCHS) -> list[torch.Tensor]:
    """Return the weights after the same training by one process that starts like member
    `source`."""
    model, optimizer = rank_bodies.model_and_optimizer(seed=ord(source))
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=batch_size, num_epochs=epochs)
    loader = Loader(rank_bodies.data(), order)
    for step in range(order.num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        rank_bodies.loss_of(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_equal_to_one_process(
    finished: list[dict[str, object]], batch_size: int, epochs: int = EPOCHS
) -> None:
    weights = [[torch.tensor(w) for w in each["weights"]] for each in finished]  # type: ignore[attr-defined]
    # The coordinator chooses whose initial weights the first generation takes.
    candidates = [one_process(batch_size, name, epochs) for name in "abcd"]
    for own in weights:
        distances = [
            max(float((a - b).abs().max()) for a, b in zip(own, other, strict=True))
            for other in candidates
        ]
        assert min(distances) < TOLERANCE


def check_each_sample_once(ranks: list[Rank], num_steps: int, epochs: int = EPOCHS) -> None:
    """Check that each sample counts once, over all members of the generation that committed its
    step."""
    counts: Counter[tuple[int, int]] = Counter()
    committed: dict[int, int] = {}
    for kind, data in (report for rank in ranks for report in rank.seen):
        if kind == "committed":
            assert committed.setdefault(data["step"], data["generation"]) == data["generation"]
    for kind, data in (report for rank in ranks for report in rank.seen):
        if kind == "tried" and committed.get(data["step"]) == data["generation"]:
            counts.update((data["epoch"], index) for index in data["indices"])
    assert len(committed) == num_steps
    assert len(counts) == NUM_SAMPLES * epochs
    assert set(counts.values()) == {1}


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "fault",
    ["kill in forward", "kill in backward", "kill in optimizer", "kill in bring-up"],
)
def test_survivors_of_a_kill_go_on_in_their_processes_and_end_as_one_process_would(
    cluster: LocalCluster, fault: str
) -> None:
    """Holds for a kill at any point of a step."""
    with Ranks() as ranks:
        run = run_of(cluster, fault.replace(" ", "-"))
        crew = [*start(ranks, run, "ab"), *start(ranks, replace(run, fault=fault), "c")]
        finished = [rank.expect("finished") for rank in crew[:2]]
        assert [rank.join() for rank in crew[:2]] == [0, 0]
        assert crew[2].join() == -signal.SIGKILL
        crew[2].drain()
        assert [each["step"] for each in finished] == [NUM_STEPS] * 2
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE)
        check_each_sample_once(crew, NUM_STEPS)


@pytest.mark.long
def test_a_stopped_member_is_removed_and_fenced_once_it_continues(cluster: LocalCluster) -> None:
    """SIGSTOP breaks no connection; the lease runs out."""
    with Ranks() as ranks:
        run = run_of(cluster, "stopped")
        crew = [
            *start(ranks, run, "ab"),
            *start(ranks, replace(run, fault="stop in backward"), "c"),
        ]
        finished = [rank.expect("finished") for rank in crew[:2]]
        assert [rank.join() for rank in crew[:2]] == [0, 0]
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE)
        crew[2].send_signal(signal.SIGCONT)
        assert crew[2].expect("raised")["error"] in ("Fenced", "JobFinished")


def test_a_joiner_gets_the_state_and_takes_its_share(cluster: LocalCluster, tmp_path: Path) -> None:
    """The state includes momentum, and no member trains a step less or more."""
    with Ranks() as ranks:
        run = run_of(cluster, "joiner", desired_members=2)
        held = HeldMembers(ranks, rank_bodies.train, run, tmp_path, at_step=6)
        crew = [*held.crew, *start(ranks, run, "c")]
        crew[2].expect("entering")
        held.release()
        finished = [rank.expect("finished") for rank in crew]
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE)
        check_each_sample_once(crew, NUM_STEPS)
        sizes = {data["world_size"] for kind, data in crew[0].seen if kind == "tried"}
        assert sizes == {2, 3}


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("nan", "NonFiniteGradient", "the loss is not finite at step 7"),
        ("raise", "ValueError", ""),
    ],
)
def test_a_member_with_a_fault_of_its_own_leaves_and_the_others_go_on(
    cluster: LocalCluster, fault: str, error: str, text: str
) -> None:
    """A NaN in the loss names the step; a user's exception arrives unchanged."""
    with Ranks() as ranks:
        run = run_of(cluster, f"fault-{fault}")
        crew = [*start(ranks, run, "ab"), *start(ranks, replace(run, fault=fault), "c")]
        raised = crew[2].expect("raised")
        assert raised["error"] == error
        assert re.search(text, raised["text"])
        finished = [rank.expect("finished") for rank in crew[:2]]
        assert [rank.join() for rank in crew[:2]] == [0, 0]
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE)


@pytest.mark.long
def test_sigterm_drains_a_member_and_breaks_no_generation(cluster: LocalCluster) -> None:
    """The member ends with 143, at a step from which on the others train without it; no step is
    repeated."""
    epochs = 60
    with Ranks() as ranks:
        crew = start(ranks, run_of(cluster, "drain", epochs=epochs), "abc")
        for _ in range(5):
            crew[2].expect("committed")
        crew[2].send_signal(signal.SIGTERM)
        assert crew[2].expect("exits") == {"code": 143, "reason": "SIGTERM"}
        assert crew[2].join() == 143
        finished = [rank.expect("finished") for rank in crew[:2]]
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE, epochs)
        check_each_sample_once(crew, 5 * epochs, epochs)
    for rank in crew:
        tried = [data["step"] for kind, data in rank.seen if kind == "tried"]
        assert tried == list(range(len(tried)))
    sizes = [data["world_size"] for kind, data in crew[0].seen if kind == "tried"]
    assert set(sizes) == {3, 2}
    assert sizes == sorted(sizes, reverse=True)


def test_sigterm_to_the_only_member_ends_it_at_its_next_step(cluster: LocalCluster) -> None:
    """The state is lost, as no other member can receive it; a later member is refused."""
    with Ranks() as ranks:
        run = run_of(cluster, "drain-alone", desired_members=1, epochs=1000)
        alone = start(ranks, run, "a")[0]
        alone.expect("committed")
        alone.send_signal(signal.SIGTERM)
        assert alone.expect("exits")["code"] == 143
        assert start(ranks, run, "b")[0].expect("raised")["error"] == "StateLost"


@pytest.mark.long
def test_members_without_a_sample_in_a_step_do_not_change_it(cluster: LocalCluster) -> None:
    """Batches of two samples are divided among three members."""
    with Ranks() as ranks:
        crew = start(ranks, run_of(cluster, "tiny-batches", batch_size=2), "abc")
        finished = [rank.expect("finished") for rank in crew]
        check_equal_to_one_process(finished, 2)
        check_each_sample_once(crew, 24 * EPOCHS)


@pytest.mark.long
def test_a_joiner_that_dies_during_its_admission_costs_no_step(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The others had stopped for it; they continue from the same step without it."""
    with Ranks() as ranks:
        run = run_of(cluster, "dying-joiner", desired_members=2)
        held = HeldMembers(ranks, rank_bodies.train, run, tmp_path, at_step=6)
        crew = held.crew
        joiner = start(ranks, replace(run, fault="kill in bring-up"), "c")[0]
        joiner.expect("entering")
        held.release()
        assert joiner.join() == -signal.SIGKILL
        finished = [rank.expect("finished") for rank in crew]
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE)
        check_each_sample_once(crew, NUM_STEPS)


@pytest.mark.long
def test_members_replaced_after_kills_at_random_moments_end_as_one_process(
    cluster: LocalCluster,
) -> None:
    """Three members are killed; a failure shows the seed."""
    seed = secrets.randbelow(1000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    epochs = 250
    with Ranks() as ranks:
        run = run_of(cluster, "random-kills", epochs=epochs)
        crew = start(ranks, run, "abc")
        survivor, first, second = rng.sample(crew, 3)
        for successor in "def":
            for _ in range(rng.randrange(1, 120)):
                survivor.expect("committed")
            # The third victim is the second's successor, which may be anywhere by now.
            victim = first if successor == "d" else second if successor == "e" else crew[4]
            victim.send_signal(signal.SIGKILL)
            crew += start(ranks, run, successor)
        alive = [survivor, crew[3], crew[5]]
        for rank in crew:
            rank.join()
            rank.drain()
        finished = [data for rank in alive for kind, data in rank.seen if kind == "finished"]
        # A successor may come too late to take part in anything.
        late = [data["error"] for rank in alive for kind, data in rank.seen if kind == "raised"]
        assert finished
        assert set(late) <= {"JobFinished", "Fenced"}
        assert len(finished) + len(late) == len(alive)
        assert [each["step"] for each in finished] == [5 * epochs] * len(finished)
        check_equal_to_one_process(finished, rank_bodies.BATCH_SIZE, epochs)
        check_each_sample_once(crew, 5 * epochs, epochs)
