"""accelerate's loop in a session: exact over a loss; unsupported calls are refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from support.frameworks import accelerate_bodies
from support.frameworks.accelerate_bodies import (
    EPOCHS,
    NUM_PARTS,
    Run,
    data,
    loop,
    network,
    plain_accelerate,
    steps_per_epoch,
)
from support.members.held_members import replaced_in_step_6
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import shoal
from shoal.integrations.accelerate import SessionAccelerator
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

pytestmark = pytest.mark.usefixtures("fresh_accelerators")

TOLERANCE = 1e-6


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("strategy", "earliest", "by_epoch"),
    [("ddp", 6, False), ("ddp", 6, True), ("fsdp", 1, False)],
)
def test_a_session_goes_on_without_a_lost_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str, earliest: int, by_epoch: bool
) -> None:
    """Member b of two is killed in the midst of step 6; a third takes its place. The weights are
    those of accelerate alone, also if the schedule was stepped just before step 6, between two
    epochs (regression: that step of the schedule was undone)."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"accelerate-{strategy}-{by_epoch}",
        member_id="",
        strategy=strategy,
        by_epoch=by_epoch,
    )
    body = accelerate_bodies.train_with_accelerate
    a, c, *_ = replaced_in_step_6(cluster, body, run, tmp_path, earliest)
    alone = plain_accelerate(by_epoch=by_epoch)
    for each in (a, c):
        assert each["step"] == steps_per_epoch(by_epoch=by_epoch) * EPOCHS
        for name, expected in alone.items():
            found = torch.tensor(each["weights"][name])
            assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), name


class Interrupted(Exception):
    """Ends a script within a step."""


def test_a_job_resumes_between_two_epochs_with_the_schedule_of_the_next(tmp_path: Path) -> None:
    """Regression: the checkpoint of an epoch's last step did not have the schedule's step after the
    epoch. The number of an iteration is the epoch, also after the job has begun again."""
    size = steps_per_epoch(by_epoch=True)

    def run(session: shoal.Session, on_part: Callable[[int], None]) -> None:
        options: dict[str, Any] = {"gradient_accumulation_steps": NUM_PARTS, "cpu": True}
        options["checkpoints"] = shoal.Checkpoints(tmp_path, every_steps=size)
        make = partial(SessionAccelerator, session, epochs=EPOCHS, **options)
        loop(make, on_part, lambda: None, by_epoch=True)

    def interrupt(epoch: int) -> None:
        if epoch == 2:
            raise Interrupted

    with pytest.raises(Interrupted), shoal.join() as session:
        run(session, interrupt)
    seen = []
    with shoal.join() as session:
        run(session, lambda epoch: seen.append((epoch, session.step_number)))
        found = session.state_dict()
    assert seen == [(2, step) for step in range(2 * size, 3 * size) for _ in range(NUM_PARTS)]
    for name, expected in plain_accelerate(by_epoch=True).items():
        assert torch.allclose(found[name], expected, rtol=0, atol=TOLERANCE), name


def prepared(session: shoal.Session, **options: Any) -> tuple[SessionAccelerator, Any, Any, Any]:
    accelerator = SessionAccelerator(session, epochs=1, cpu=True, **options)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data(), 6))


def test_bfloat16_is_autocast(session: shoal.Session) -> None:
    accelerator, model, optimizer, loader = prepared(session, mixed_precision="bf16")
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            assert outputs.dtype == torch.float32, "as accelerate gives them"
            accelerator.backward(cross_entropy(outputs, targets))
            optimizer.step()
    assert session.step_number == 8
    plain = network()(data()[0][0])
    assert not torch.equal(model(data()[0][0]), plain)


def test_a_pass_outside_of_accumulate_is_refused(session: shoal.Session) -> None:
    accelerator, model, _, loader = prepared(session)
    inputs, targets = next(iter(loader))
    with pytest.raises(InvalidSpec, match=r"accelerator\.backward.*outside of accumulate"):
        accelerator.backward(cross_entropy(model(inputs), targets))


def test_clipping_of_a_part_of_the_model_is_refused_by_name(session: shoal.Session) -> None:
    """Regression: all gradients were clipped to the norm that was meant for one layer."""
    accelerator, model, _, loader = prepared(session)
    first, _, last = accelerator.unwrap_model(model)
    inputs, targets = next(iter(loader))
    with accelerator.accumulate(model):
        accelerator.backward(cross_entropy(model(inputs), targets))
        with pytest.raises(InvalidSpec, match=r"without 0\.weight, 0\.bias; expected model"):
            accelerator.clip_grad_norm_(last.parameters(), 1.0)
        assert accelerator.clip_grad_norm_([*first.parameters(), *last.parameters()], 1.0) > 0
    assert session.step_number == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("gather", "session.all_reduce"),
        ("gather_for_metrics", "session.evaluate"),
        ("reduce", "session.all_reduce"),
        ("save_state", "checkpoints="),
        ("load_state", "checkpoints="),
        ("clip_grad_value_", "clip_grad_norm_"),
        ("no_sync", "gradient_accumulation_steps"),
    ],
)
def test_calls_that_would_act_on_one_member_alone_are_refused(
    session: shoal.Session, call: str, words: str
) -> None:
    accelerator = SessionAccelerator(session, cpu=True)
    with pytest.raises(InvalidSpec, match=rf"accelerator\.{call}.*{words}"):
        getattr(accelerator, call)(torch.ones(1))


def test_trackers_are_finished_and_the_session_goes_on(session: shoal.Session) -> None:
    """accelerate's own `end_training` would destroy the process group, which belongs to the
    members."""

    class Noting(GeneralTracker):
        name, requires_logging_directory = "noting", False
        is_finished = False

        @property
        def tracker(self) -> None:
            """Underlying tracker: none."""

        def finish(self) -> None:
            self.is_finished = True

    accelerator = SessionAccelerator(session, cpu=True)
    tracker = Noting()
    accelerator.trackers = [tracker]
    accelerator.end_training()
    assert tracker.is_finished


def test_a_model_is_prepared_with_its_optimizer_and_data(session: shoal.Session) -> None:
    accelerator = SessionAccelerator(session, cpu=True)
    with pytest.raises(InvalidSpec, match="1 models, 0 optimizers, 0 DataLoaders"):
        accelerator.prepare(network())


def test_float16_is_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="mixed_precision='fp16'"):
        SessionAccelerator(session, cpu=True, mixed_precision="fp16")


def test_the_length_of_a_loader_is_the_number_of_batches_of_an_epoch(
    session: shoal.Session,
) -> None:
    *_, loader = prepared(session, gradient_accumulation_steps=NUM_PARTS)
    assert len(loader) == 8
    assert EPOCHS == 3
