"""Lightning's Trainer: under Shoal's rendezvous, in a script that knows nothing of Shoal, and in a
session, where a member may be lost and the others train on."""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from support.members.held_members import replaced_in_step_6
from support.members.thread_members import ThreadJob
from support.processes.framework_agents import EXAMPLES, Agents
from support.processes.ranks import Ranks
from support.training import lightning_bodies
from support.training.lightning_bodies import ORDER, Net, Run, data, trainer_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import shoal
from shoal.integrations.agreed_stopping import AgreedCheckpoints
from shoal.integrations.lightning import SessionStrategy
from shoal.integrations.trainer_limits import epochs_of
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, JobFinished

RUN_S = 90.0
EPOCHS = 12
TOLERANCE = 1e-5  # fp32: members' sums are taken in another order
NOBODY = {"coordinator": "", "job": "", "member_id": ""}


def say_nothing(kind: str, /, **_: Any) -> None:
    """Discard the report."""


@pytest.fixture
def session(cluster: LocalCluster) -> Iterator[shoal.Session]:
    name = f"lightning-{secrets.token_hex(4)}"
    with shoal.join(name, coordinator=cluster.coordinator) as joined:
        yield joined


def fit_in_threads(cluster: LocalCluster, *trainers: dict[str, Any]) -> list[Trainer]:
    """Train `Numbered` on one member for each dict of the Trainer's options; return the
    Trainers."""
    job = ThreadJob(cluster=cluster, num_members=len(trainers))

    def member(rank: int) -> Trainer:
        with job.join(member_id=f"m{rank}") as session:
            elastic = SessionStrategy(session)
            trainer = trainer_of(elastic, enable_checkpointing=True, **trainers[rank])
            module = Numbered(session, say_nothing, Run(**NOBODY), float(rank))
            batches = elastic.batches(data(), global_batch_size=12)
            trainer.fit(module, batches, DataLoader(TensorDataset(*data()), 50))
            assert trainer.global_step == session.step_number
            return trainer

    return job.results(member, *((rank,) for rank in range(len(trainers))))


class Numbered(Net):
    """Logs the member's own number as a metric."""

    def __init__(self, session: shoal.Session, report: Any, run: Run, number: float) -> None:
        super().__init__(session, report, run)
        self.number = number

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.log("own", self.number, on_step=False, on_epoch=True)
        if not self.number:
            self.log("first", 4.0, on_step=False, on_epoch=True)
        return super().training_step(batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("score", self.number)


def fit(session: shoal.Session, kind: type[Net], **changes: Any) -> None:
    elastic = SessionStrategy(session)
    module = kind(session, say_nothing, Run(**NOBODY))
    trainer_of(elastic, **changes).fit(module, elastic.batches(data(), global_batch_size=12))


def distance(weights: dict[str, list[float]]) -> float:
    alone = lightning_bodies.one_process()
    assert set(weights) == set(alone)
    return max(float((torch.tensor(weights[name]) - alone[name]).abs().max()) for name in alone)


@pytest.mark.long
def test_a_killed_worker_is_started_again_and_goes_on_from_the_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with Agents(
        endpoint=cluster.coordinator,
        job="lightning-nodes",
        script="lightning_digits.py",
        directory=tmp_path,
    ) as agents:
        nodes = [agents.torchrun(name, nodes="2") for name in ("first", "second")]
        agents.await_epoch(1, RUN_S)
        agents.kill_worker(nodes[1])
        assert [node.wait(RUN_S) for node in nodes] == [0, 0], agents.logs()

        epochs = agents.epochs()
        assert {epoch.ranks for epoch in epochs} == {2}
        numbers = [epoch.number for epoch in epochs]
        assert set(numbers) == set(range(EPOCHS))
        assert numbers.count(0) == 1, "it began again from the start"
        assert "Restored all states from the checkpoint" in agents.logs()
        by_number = {epoch.number: epoch.loss for epoch in epochs}
        assert by_number[EPOCHS - 1] < 0.2 < by_number[0]


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "earliest"), [("ddp", 6), ("fsdp", 1)])
def test_a_session_goes_on_without_a_lost_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str, earliest: int
) -> None:
    """Member b of two is killed in the midst of step 6, and a standby replaces it. Training
    continues with that step, or with the first step that no copy contains. Lightning counts the
    job's steps and epochs on both members, and the weights are those of a plain loop."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"lightning-{strategy}",
        member_id="",
        strategy=strategy,
        validates=strategy == "ddp",
    )
    a, c, rank, _ = replaced_in_step_6(cluster, lightning_bodies.train, run, tmp_path, earliest)
    assert [each["step"] for each in (a, c)] == [ORDER.num_steps] * 2
    assert [each["trainer_steps"] for each in (a, c)] == [ORDER.num_steps] * 2
    assert [each["trainer_epochs"] for each in (a, c)] == [ORDER.num_epochs] * 2
    if run.validates:
        validated = [data for kind, data in rank.seen if kind == "validated"]
        # Before the first step, as Lightning's sanity check does, and after each epoch.
        assert validated == [{"step": step, "trains": False} for step in (0, 5, 10, 15)]
        assert c["validated"] == [0, 10, 15], "that of the epoch within which it joined, too"
    for each in (a, c):
        assert distance(each["weights"]) <= TOLERANCE


@pytest.mark.long
def test_sigterm_drains_a_member(cluster: LocalCluster, tmp_path: Path) -> None:
    """The member drains as in any session, and not as Lightning would end: the step is finished
    first."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    run = Run(
        coordinator=cluster.coordinator,
        job="lightning-drained",
        member_id="a",
        num_members=1,
        epochs=10_000,  # more than are trained before the coordinator has agreed
        hold_at=2,
        gate=str(gate),
    )
    with Ranks() as ranks:
        rank = ranks.start(lightning_bodies.train, run)
        rank.expect("holds")
        rank.send_signal(signal.SIGTERM)
        gate.write_bytes(b"")
        ended = rank.expect("exits")
    assert ended == {"code": 143, "reason": "SIGTERM"}


def test_a_single_member_under_a_sharded_strategy(cluster: LocalCluster) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    run = Run(
        coordinator=cluster.coordinator,
        job="lightning-alone",
        member_id="a",
        strategy="fsdp",
        num_members=1,
    )
    lightning_bodies.train(lambda kind, **data: events.append((kind, data)), run)
    kind, ended = events[-1]
    assert kind == "finished"
    assert ended["trainer_steps"] == ORDER.num_steps
    assert distance(ended["weights"]) <= TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            "cannot change from epoch to epoch",
        ),
        ({"enable_checkpointing": True}, "enable_checkpointing=False"),
        ({"gradient_clip_algorithm": "value"}, "common norm"),
        ({"precision": "bf16-true"}, "precision=bf16-true"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "saw StochasticWeightAveraging"),
        ({"callbacks": [EMAWeightAveraging()]}, "saw EMAWeightAveraging"),
        ({"callbacks": [BackboneFinetuning()]}, "saw BackboneFinetuning"),
        ({"callbacks": [LearningRateFinder()]}, "saw LearningRateFinder"),
        ({"limit_train_batches": 1}, "limit_train_batches"),
        ({"limit_train_batches": 0.5}, "limit_train_batches"),
        ({"overfit_batches": 1}, "overfit_batches"),
        ({"fast_dev_run": True}, "fast_dev_run"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"val_check_interval": "00:00:30:00"}, "saw val_check_interval, a time"),
    ],
)
def test_settings_that_a_session_cannot_keep_exact_are_refused(
    session: shoal.Session, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec, match=message):
        fit(session, Net, default_root_dir=tmp_path, **changes)


@pytest.mark.parametrize(
    "callback", [EarlyStopping("score"), ModelCheckpoint(monitor="score", save_weights_only=True)]
)
def test_callbacks_whose_record_a_newcomer_lacks_are_refused(
    session: shoal.Session, callback: Callback
) -> None:
    elastic = SessionStrategy(session)
    module = Net(session, say_nothing, Run(**NOBODY, strategy="local-sgd"))
    checkpoints = isinstance(callback, ModelCheckpoint)
    trainer = trainer_of(elastic, callbacks=[callback], enable_checkpointing=checkpoints)
    with pytest.raises(InvalidSpec, match=r"monitor='score'\) under strategy local-sgd"):
        trainer.fit(module, elastic.batches(data(), global_batch_size=12))


def test_validation_that_needs_all_members_is_refused(cluster: LocalCluster) -> None:
    run = Run(
        coordinator=cluster.coordinator,
        job="lightning-validation",
        member_id="a",
        strategy="fsdp",
        validates=True,
    )
    with pytest.raises(InvalidSpec, match="strategy fsdp"):
        lightning_bodies.train(say_nothing, run)


class ByHand(Net):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False


def test_steps_by_hand_are_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="automatic_optimization = False"):
        fit(session, ByHand, gradient_clip_val=None)


class Watching(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        watched = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": watched, "monitor": "loss"},
        }


def test_schedulers_that_look_at_a_metric_are_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="saw ReduceLROnPlateau"):
        fit(session, Watching)


@pytest.mark.long
def test_bfloat16_is_autocast_and_weights_are_written_by_one_member(
    session: shoal.Session, tmp_path: Path
) -> None:
    """Lightning alone reads the written file."""
    seen: list[bool] = []

    class Cast(Net):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch)

    kept = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_epochs=1)
    fit(session, Cast, precision="bf16-mixed", enable_checkpointing=True, callbacks=[kept])
    assert seen == [True] * 5
    (path,) = tmp_path.glob("*.ckpt")
    found = torch.load(path, weights_only=True)["state_dict"]
    own = {f"layers.{name}": tensor for name, tensor in session.state_dict().items()}
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.long
def test_a_metric_is_of_this_member_alone(session: shoal.Session) -> None:
    """A metric stays local, like the values of `self.log`. torchmetrics would gather it over the
    members, and if one were lost meanwhile all of them would end with an error of torch's."""
    found: list[bool] = []

    class Measured(Net):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.score = MeanMetric()

        def on_train_epoch_end(self) -> None:
            found.append(self.score.sync_on_compute)

    fit(session, Measured)
    assert found == [False]


class Indexed(Net):
    """Logs the mean of the samples' numbers."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.log("number", batch[0][:, 0].mean(), on_epoch=True, batch_size=len(batch[0]))
        return super().training_step(batch)


def test_stand_ins_are_not_logged(session: shoal.Session) -> None:
    """The last step has one sample and three parts without one."""
    elastic = SessionStrategy(session)
    x, y = (each[:13].clone() for each in data())
    x[:, 0] = torch.arange(13.0)
    trainer = trainer_of(elastic, accumulate_grad_batches=4, max_epochs=1)
    module = Indexed(session, say_nothing, Run(**NOBODY))
    trainer.fit(module, elastic.batches((x, y), global_batch_size=4, shuffle=False))
    assert float(trainer.callback_metrics["number_epoch"]) == pytest.approx(6.0)
    assert float(trainer.callback_metrics["number_step"]) == 12.0


@pytest.mark.long
def test_a_newcomer_takes_over_the_record_of_kept_checkpoints(
    session: shoal.Session, tmp_path: Path
) -> None:
    """A newcomer without that record would keep a worse checkpoint as the best, once it has rank 0.
    Its directory may differ."""

    class Judged(Net):
        def on_train_epoch_end(self) -> None:
            self.log("score", torch.tensor([3.0, 1.0, 2.0][self.current_epoch]))

    options = {"monitor": "score", "save_top_k": 2, "save_last": True, "save_weights_only": True}
    kept = ModelCheckpoint(tmp_path / "old", filename="{epoch}", **options)  # type: ignore[arg-type]
    fit(session, Judged, max_epochs=3, enable_checkpointing=True, callbacks=[kept])
    newcomer = ModelCheckpoint(tmp_path / "new", **options)  # type: ignore[arg-type]
    AgreedCheckpoints(newcomer, session).load_state_dict(
        AgreedCheckpoints(kept, session).state_dict()
    )
    new = tmp_path / "new"
    assert newcomer.best_model_path == str(new / "epoch=1.ckpt")
    assert newcomer.last_model_path == newcomer._last_checkpoint_saved == str(new / "last.ckpt")
    assert newcomer.best_k_models == {
        str(new / "epoch=1.ckpt"): 1.0,
        str(new / "epoch=2.ckpt"): 2.0,
    }
    assert newcomer.best_model_score == 1.0
    assert newcomer.kth_value == 2.0


@pytest.mark.parametrize("is_first", [True, False])
def test_rank_0_alone_links_the_last_checkpoint(tmp_path: Path, is_first: bool) -> None:
    """Regression: all members removed and made the link of one folder at the same moment."""
    callback: Any = ModelCheckpoint(tmp_path, save_last="link")
    session: Any = SimpleNamespace(is_first=is_first)
    AgreedCheckpoints(callback, session)
    trainer = SimpleNamespace(is_global_zero=True, strategy=SimpleNamespace(barrier=lambda: None))
    last = tmp_path / "last.ckpt"
    callback._link_checkpoint(trainer, str(tmp_path / "epoch=1.ckpt"), str(last))
    assert last.is_symlink() == is_first


@pytest.mark.long
def test_names_of_checkpoints_contain_the_mean_of_the_members_metrics(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """The names are registered state: with each member's own metrics, the job would end. A member
    may lack a metric, as one that has just joined does."""

    def kept() -> ModelCheckpoint:
        named = ModelCheckpoint(
            tmp_path,
            "{epoch}-{score:.2f}-{own:.3f}-{first:.0f}",
            monitor="score",
            save_last=True,
            save_weights_only=True,
            save_on_train_epoch_end=True,
        )
        named.CHECKPOINT_NAME_LAST = "last-{own:.1f}"
        return named

    fit_in_threads(cluster, *({"callbacks": [kept()]} for _ in range(2)))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"epoch=0-score=0.50-own=0.500-first=4.ckpt", "last-own=0.5.ckpt"}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_schedules_and_parts_are_those_of_one_process(
    cluster: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """Schedulers change the rate after each step and after each epoch; batches have two parts; a
    member is lost and replaced."""
    run = Run(
        coordinator=cluster.coordinator,
        job=f"lightning-schedules-{strategy}",
        member_id="",
        strategy=strategy,
        scheduled=True,
    )
    a, c, *_ = replaced_in_step_6(
        cluster, lightning_bodies.train, run, tmp_path, 6 if strategy == "ddp" else 1
    )
    alone = lightning_bodies.one_process(scheduled=True)
    for each in (a, c):
        for name, expected in alone.items():
            found = torch.tensor(each["weights"][name])
            assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), name


def test_batches_that_the_session_did_not_cut_are_refused(session: shoal.Session) -> None:
    trainer, module = trainer_of(SessionStrategy(session)), Net(session, say_nothing, Run(**NOBODY))
    with pytest.raises(InvalidSpec, match="batches that are not from"):
        trainer.fit(module, DataLoader(TensorDataset(*data()), 12))


def test_batches_beside_those_that_the_session_has_cut_are_refused(session: shoal.Session) -> None:
    elastic = SessionStrategy(session)
    elastic.batches(data(), global_batch_size=12)
    module = Net(session, say_nothing, Run(**NOBODY))
    with pytest.raises(InvalidSpec, match=r"batches that are not from.*datamodule\.setup"):
        trainer_of(elastic).fit(module, DataLoader(TensorDataset(*data()), 12))


class Asking(Net):
    """A module that asks the Trainer for the length of the training, as for a schedule."""

    asked: tuple[int | float | None, ...] = ()

    def configure_optimizers(self) -> Any:
        Asking.asked = (self.trainer.max_epochs, self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("of_trainer", "of_batches", "asked", "steps"),
    [
        ({"max_epochs": 3}, {}, (3, 15), 15),
        ({"max_epochs": -1}, {"epochs": 2}, (2, 10), 10),
        ({"max_epochs": None}, {"epochs": 2}, (2, 10), 10),
        ({"max_epochs": 2}, {"epochs": 2}, (2, 10), 10),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, {}, (2, 10), 10),
        ({"max_epochs": None, "max_steps": 7}, {}, (2, 7), 7),
        ({"max_epochs": -1, "max_steps": 7}, {"epochs": 3}, (3, 7), 7),
    ],
)
def test_the_trainer_shows_scripts_the_length_of_the_job(
    session: shoal.Session,
    of_trainer: dict[str, Any],
    of_batches: dict[str, Any],
    asked: tuple[int, int],
    steps: int,
) -> None:
    elastic = SessionStrategy(session)
    trainer = trainer_of(elastic, **of_trainer)
    module = Asking(session, say_nothing, Run(**NOBODY))
    trainer.fit(module, elastic.batches(data(), global_batch_size=12, **of_batches))
    assert Asking.asked == asked
    assert session.step_number == trainer.global_step == steps


@pytest.mark.parametrize(
    ("max_epochs", "of_batches", "expected"),
    [(1000, None, 1000), (1000, 1000, 1000), (1000, 2, 2)],
)
def test_a_trainers_thousand_epochs_are_trained_unless_batches_have_their_own(
    max_epochs: int, of_batches: int | None, expected: int
) -> None:
    """Lightning, too, trains 1000 epochs, also if the Trainer was given none."""
    trainer = Trainer(max_epochs=max_epochs, accelerator="cpu", logger=False)
    assert epochs_of(trainer, of_batches, 5) == expected


@pytest.mark.parametrize(
    "endless", [{"max_epochs": -1}, {"max_epochs": None, "max_time": "00:01:00:00"}]
)
def test_a_job_without_a_length_is_refused(endless: dict[str, Any]) -> None:
    """A default, such as one epoch, would be a guess."""
    trainer = Trainer(accelerator="cpu", logger=False, **endless)
    with pytest.raises(InvalidSpec, match=r"length.*expected max_epochs= or max_steps="):
        epochs_of(trainer, None, 5)


def test_two_lengths_are_refused(session: shoal.Session) -> None:
    elastic = SessionStrategy(session)
    module = Net(session, say_nothing, Run(**NOBODY))
    with pytest.raises(InvalidSpec, match=r"max_epochs=5\) and batches\(\.\.\., epochs=2"):
        trainer_of(elastic, max_epochs=5).fit(
            module, elastic.batches(data(), global_batch_size=12, epochs=2)
        )


class Stopping(Net):
    """A module that logs a constant value, on which EarlyStopping stops."""

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.log("flat", 1.0, on_epoch=True)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("callback", "steps"),
    [(EarlyStopping("flat", patience=2), 15), (Timer({"microseconds": 1}), 1)],
    ids=["early", "timer"],
)
def test_a_callback_that_stops_ends_the_job(
    cluster: LocalCluster, callback: Any, steps: int
) -> None:
    """The job counts as finished: a member that joins later gets JobFinished."""
    name = f"lightning-{secrets.token_hex(4)}"
    with shoal.join(name, coordinator=cluster.coordinator) as session:
        elastic = SessionStrategy(session)
        trainer = trainer_of(elastic, callbacks=[callback], max_epochs=9)
        module = Stopping(session, say_nothing, Run(**NOBODY))
        trainer.fit(module, elastic.batches(data(), global_batch_size=12))
        assert session.step_number == trainer.global_step == steps
    with (
        pytest.raises(JobFinished, match="Lightning stopped the training"),
        shoal.join(name, coordinator=cluster.coordinator),
    ):
        pass


class StopsAfter(Callback):
    """Stops this member's Trainer once a step is done, as Timer may."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self._step


@pytest.mark.long
def test_a_stop_of_one_member_ends_the_job_on_all(cluster: LocalCluster, tmp_path: Path) -> None:
    """Callbacks with shared calls follow a stop: all members make them after the same step."""

    def following() -> list[Callback]:
        options = {"monitor": "score", "save_weights_only": True}
        kept = ModelCheckpoint(tmp_path, "{step}", **options)  # type: ignore[arg-type]
        return [EarlyStopping("score", patience=9), kept]

    one, other = fit_in_threads(
        cluster,
        {"callbacks": [StopsAfter(3), *following()], "max_epochs": 3},
        {"callbacks": following(), "max_epochs": 3},
    )
    assert one.global_step == other.global_step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step=3.ckpt"]


def is_paused(session: shoal.Session) -> bool:
    return session._pause.is_on


class Pauses(Net):
    """Records where a pause is on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[str, bool] = {}

    def validation_step(self, batch: list[Tensor]) -> None:
        self.seen["batch"] = is_paused(self.session)

    def on_validation_epoch_end(self) -> None:
        self.seen["end"] = is_paused(self.session)


def test_the_others_wait_for_validations_and_checkpoints(
    session: shoal.Session, tmp_path: Path
) -> None:
    """Hooks after a validation are outside of the pause: they may make shared calls, or pause."""
    module = Pauses(session, say_nothing, Run(**NOBODY))

    class Watched(TorchCheckpointIO):
        def save_checkpoint(self, *given: Any, **options: Any) -> None:
            module.seen["write"] = is_paused(session)
            super().save_checkpoint(*given, **options)

    elastic = SessionStrategy(session)
    kept = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = trainer_of(
        elastic,
        enable_checkpointing=True,
        callbacks=[kept],
        plugins=[Watched()],
        num_sanity_val_steps=0,
    )
    batches = elastic.batches(data(), global_batch_size=12)
    trainer.fit(module, batches, DataLoader(TensorDataset(*data()), 50))
    assert module.seen == {"batch": True, "end": False, "write": True}


class Parts(LightningModule):
    """An encoder and a decoder with one optimizer; records its batches."""

    def __init__(self, session: shoal.Session) -> None:
        super().__init__()
        self.session = session
        self.encoder, self.decoder = nn.Linear(6, 2), nn.Linear(2, 6)
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(batch)
        inputs = batch["x"] if isinstance(batch, dict) else batch[0]
        return (self.decoder(self.encoder(inputs)) - inputs).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        models = [self.encoder, self.decoder]
        (self.encoder, self.decoder), optimizer = self.session.distribute(models, optimizer)
        return optimizer


INPUTS, LABELS = data()
ROWS: list[tuple[Any, Any]] = [
    (TensorDataset(INPUTS), ["x"]),
    (TensorDataset(INPUTS, LABELS), ["x", "y"]),
    (TensorDataset(INPUTS, LABELS, INPUTS), ["x", "y", "x"]),
    ([(x, y, x) for x, y in zip(INPUTS, LABELS, strict=True)], ["x", "y", "x"]),
    ([{"x": x, "y": y} for x, y in zip(INPUTS, LABELS, strict=True)], {"x": "x", "y": "y"}),
]


@pytest.mark.sampled()
@pytest.mark.parametrize(("rows", "form"), ROWS, ids=["one", "two", "three", "rows", "dicts"])
def test_batches_are_those_of_a_dataloader(session: shoal.Session, rows: Any, form: Any) -> None:
    elastic = SessionStrategy(session)
    module = Parts(session)
    trainer = trainer_of(elastic, max_epochs=1)
    trainer.fit(module, elastic.batches(DataLoader(rows, batch_size=20)))
    whole = {"x": INPUTS, "y": LABELS}
    assert [len(batch) for batch in module.seen] == [len(form)] * 3
    for place in form if isinstance(form, dict) else range(len(form)):
        found = torch.cat([batch[place] for batch in module.seen])
        assert torch.equal(found, whole[form[place]])


@pytest.mark.long
def test_the_lightning_example_trains_with_two_workers(cluster: LocalCluster) -> None:
    run = [sys.executable, "-m", "shoal_client", "run", "-n", "2", "--job", "lightning-example"]
    script = EXAMPLES / "lightning_elastic.py"
    done = subprocess.run(
        [*run, "--coordinator", cluster.coordinator, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = re.findall(r"rank \d: ([\d.]+)% correct after 380 steps", done.stdout + done.stderr)
    assert len(shares) == 2
    assert all(float(share) > 95 for share in shares)


class Counting(Net):
    """Records the Trainer's epoch and index of each batch, and the epochs that have ended."""

    def __init__(self, session: shoal.Session, checkpoints: shoal.Checkpoints) -> None:
        super().__init__(session, say_nothing, Run(**NOBODY))
        self.checkpoints = checkpoints
        self.seen: list[tuple[int, int]] = []
        self.ended: list[int] = []

    def configure_optimizers(self) -> Any:
        own = lightning_bodies.optimizer_of(self.layers)
        self.each_epoch = StepLR(own, 1, 0.5)
        self.layers, optimizer = self.session.distribute(
            self.layers, own, "ddp", checkpoints=self.checkpoints
        )
        return [optimizer], [self.each_epoch]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        self.seen.append((self.trainer.current_epoch, batch_idx))
        return cross_entropy(self.layers(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.ended.append(self.trainer.current_epoch)


@pytest.mark.parametrize(
    ("batch_size", "places"),
    [
        (5, [(1, index) for index in range(4, 10)] + [(2, index) for index in range(10)]),
        (20, [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]),
    ],
)
def test_epochs_after_a_change_of_the_batch_size_are_those_of_the_samples(
    tmp_path: Path, batch_size: int, places: list[tuple[int, int]]
) -> None:
    """50 samples, 3 epochs, batches of 10 up to step 7. Batches of the epoch within which the size
    changes are numbered towards its last; counters, schedules and the end follow the samples."""
    for size, epochs, every_steps in ((10, 2, 7), (batch_size, 3, 100)):
        with shoal.join() as session:
            module = Counting(session, shoal.Checkpoints(tmp_path, every_steps=every_steps))
            elastic = SessionStrategy(session)
            batches = elastic.batches(data(), global_batch_size=size)
            trainer = trainer_of(elastic, max_epochs=epochs)
            trainer.fit(module, batches)
    assert module.seen == places
    assert module.ended == [1, 2]
    assert trainer.current_epoch == 3
    assert trainer.global_step == session.step_number == 7 + len(places)
    assert module.each_epoch.last_epoch == 3


def test_max_steps_beyond_the_samples_of_its_epochs_is_refused(tmp_path: Path) -> None:
    """Batches are smaller than before the change: the planned epochs have too few steps."""
    with pytest.raises(InvalidSpec, match="max_steps=14"):
        for size, max_steps, every_steps in ((10, 10, 7), (5, 14, 100)):
            with shoal.join() as session:
                module = Counting(session, shoal.Checkpoints(tmp_path, every_steps=every_steps))
                elastic = SessionStrategy(session)
                batches = elastic.batches(data(), global_batch_size=size)
                trainer = trainer_of(elastic, max_epochs=-1, max_steps=max_steps)
                trainer.fit(module, batches)
