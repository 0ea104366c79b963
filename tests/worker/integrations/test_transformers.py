"""Hugging Face's Trainer in a session: exact over losses; unsupported settings are refused."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import transformers_bodies
from support.frameworks.accelerate_bodies import Run
from support.frameworks.transformers_bodies import (
    BATCH,
    STEPS_PER_EPOCH,
    TRAINER_STEPS,
    VOCABULARY,
    inputs_of,
    losses_of,
    plain_trainer,
)
from support.members.held_members import replaced_in_step_6
from support.members.thread_members import ThreadJob
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    EarlyStoppingCallback,
    PreTrainedConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
)

import shoal
from shoal.integrations.transformers import SessionSeq2SeqTrainer, SessionTrainer
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

pytestmark = pytest.mark.usefixtures("fresh_accelerators")

TOLERANCE = 1e-5


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.long
def test_a_member_alone_trains_as_trainer_does(session: shoal.Session) -> None:
    """The run has tied weights, parts of steps, losses by token, a schedule, clipping and
    evaluation."""
    trainer = SessionTrainer(session, **inputs_of())
    trainer.train()
    weights, plain = plain_trainer()
    assert trainer.state.global_step == session.step_number == TRAINER_STEPS
    assert distance(session.state_dict(), weights) <= TOLERANCE
    assert losses_of(trainer) == pytest.approx(losses_of(plain), abs=1e-4)
    logged = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    expected = [each["loss"] for each in plain.state.log_history if "loss" in each]
    assert logged == pytest.approx(expected, abs=1e-3)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(("strategy", "earliest"), [("ddp", 6), ("fsdp", 1)])
def test_a_session_goes_on_without_a_lost_member(
    cluster: LocalCluster, tmp_path: Path, strategy: str, earliest: int
) -> None:
    """Member b of two is killed once both have clipped their gradients of step 6; a third takes its
    place. The step is repeated, as the members vote again after clipping. Weights and evaluations
    are those of Trainer alone."""
    run = Run(
        coordinator=cluster.coordinator, job=f"hf-{strategy}", member_id="", strategy=strategy
    )
    body = transformers_bodies.train_with_trainer
    a, c, *_ = replaced_in_step_6(cluster, body, run, tmp_path, earliest)
    alone, plain = plain_trainer()
    for each in (a, c):
        assert each["step"] == each["trainer_steps"] == TRAINER_STEPS
        weights = {name: torch.tensor(value) for name, value in each["weights"].items()}
        assert distance(weights, alone) <= TOLERANCE
        assert each["losses"][-2:] == pytest.approx(losses_of(plain)[-2:], abs=1e-3)


@pytest.mark.long
def test_max_steps_ends_the_job(session: shoal.Session) -> None:
    trainer = SessionTrainer(session, **inputs_of(max_steps=STEPS_PER_EPOCH + 2))
    trainer.train()
    weights, _ = plain_trainer(max_steps=STEPS_PER_EPOCH + 2)
    assert session.step_number == STEPS_PER_EPOCH + 2
    assert distance(session.state_dict(), weights) <= TOLERANCE


class StopsIn(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 3


@pytest.mark.long
def test_a_callback_ends_the_job(session: shoal.Session) -> None:
    trainer = SessionTrainer(session, **inputs_of(), callbacks=[StopsIn()])
    trainer.train()
    assert session.step_number == trainer.state.global_step == 3


@pytest.mark.long
def test_the_others_wait_while_the_model_is_saved(session: shoal.Session, tmp_path: Path) -> None:
    class Watched(SessionTrainer):
        def _save(self, *given: Any, **options: Any) -> None:
            assert session._pause.is_on
            if given[0] == str(tmp_path / "a"):
                with session.pause("a script's own, within it"):
                    assert session._pause.is_on
                assert session._pause.is_on
            super()._save(*given, **options)

    trainer = Watched(session, **inputs_of(max_steps=1))
    trainer.train()
    trainer.save_model(str(tmp_path / "a"))
    with session.pause("saving, as the script has it"):
        trainer.save_model(str(tmp_path / "b"))
    assert all((tmp_path / name / "model.safetensors").exists() for name in "ab")


@pytest.mark.long
def test_a_callback_of_one_member_ends_the_job_on_all(cluster: LocalCluster) -> None:
    """The epoch within which the job ends is evaluated, by all members together."""
    job = ThreadJob(cluster=cluster, num_members=2)
    # Threads of a process share its generator, so models are made before.
    made = [(inputs_of(), callbacks) for callbacks in ([StopsIn()], [])]

    def member(inputs: dict[str, Any], callbacks: list[TrainerCallback]) -> Any:
        with job.join() as session:
            trainer = SessionTrainer(session, **inputs, callbacks=callbacks)
            trainer.train()
            return session.step_number, trainer.state.global_step, losses_of(trainer)

    one, other = job.results(member, *made)
    assert one == other
    assert one[:2] == (3, 3)
    assert len(one[2]) == 1


@pytest.mark.long
def test_metrics_of_predictions_stop_the_training(session: shoal.Session) -> None:
    """The metric never improves, so training stops after the second evaluation."""

    def accuracy(predicted: Any) -> dict[str, float]:
        assert predicted.predictions.shape[:2] == (10, 8)
        return {"fixed": 1.0}

    options = {
        "metric_for_best_model": "fixed",
        "greater_is_better": True,
    }
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = SessionTrainer(
        session, **inputs_of(**options), compute_metrics=accuracy, callbacks=[stopping]
    )
    trainer.train()
    assert session.step_number == 2 * STEPS_PER_EPOCH


@pytest.mark.long
def test_bfloat16_is_autocast(session: shoal.Session) -> None:
    seen: list[bool] = []
    inputs = inputs_of(bf16=True, max_steps=2)
    inputs["model"].lm_head.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    SessionTrainer(session, **inputs).train()
    assert seen
    assert all(seen)


class OwnLoss(SessionTrainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss


@pytest.mark.long
def test_a_loss_of_unknown_weight_is_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="loss_is_scaled_for_ga"):
        OwnLoss(session, **inputs_of()).train()


class Tagger(torch.nn.Module):
    """A user's own model: its forward does not take `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.body = torch.nn.Embedding(VOCABULARY, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Any:
        del attention_mask, labels
        return {"logits": self.body(input_ids)}


def tagger_of(**changes: Any) -> dict[str, Any]:
    """Trainer arguments for `Tagger`: each token that is not padding has one of four labels."""
    inputs = inputs_of(label_smoothing_factor=0.1, max_steps=2, eval_strategy="no", **changes)
    data = [
        {**each, "labels": each["labels"].where(each["labels"] < 0, each["labels"] % 4)}
        for each in inputs["train_dataset"]
    ]
    return {**inputs, "model": Tagger(), "train_dataset": data, "eval_dataset": None}


@pytest.mark.long
def test_a_smoothed_mean_over_labels_has_their_number_as_weight(
    session: shoal.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member's share may be full of padding: its mean has its number of labels as weight."""
    weights: list[Any] = []
    plain = session.backward

    def backward(loss: Tensor, *, weight: Any = None) -> None:
        weights.append(weight)
        plain(loss, weight=weight)

    monkeypatch.setattr(session, "backward", backward)
    inputs = tagger_of(gradient_accumulation_steps=1)
    SessionTrainer(session, **inputs).train()
    labels = [int(each["labels"].ne(-100).sum()) for each in inputs["train_dataset"]]
    assert weights == [sum(labels[:BATCH]), sum(labels[BATCH : 2 * BATCH])]


@pytest.mark.long
def test_a_smoothed_mean_of_each_part_is_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="label_smoothing_factor"):
        SessionTrainer(session, **tagger_of()).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_strategy": "epoch"}, "save_strategy='epoch'.*checkpoints="),
        ({"save_strategy": "epoch", "load_best_model_at_end": True}, "load_best.*save_model"),
        ({"eval_on_start": True}, "eval_on_start"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"torch_compile": True}, "torch.compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_settings_that_a_session_cannot_keep_exact_are_refused(
    session: shoal.Session, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSpec, match=message):
        SessionTrainer(session, **inputs_of(**changes))


@pytest.mark.long
def test_losses_of_steps_that_are_taken_again_are_counted_once(
    session: shoal.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logged mean counts them once, also if the job goes back by several steps."""
    trainer = SessionTrainer(session, **inputs_of(logging_steps=100))
    before: list[float] = []

    class Noting(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            before.append(float(trainer._tr_loss))

    trainer.add_callback(Noting())
    trainer.train()
    monkeypatch.setattr(trainer._present(), "position", lambda: 3)
    trainer._globalstep_last_logged = 0
    trainer._restore_position()
    assert float(trainer._tr_loss) == pytest.approx(before[3])
    assert before[3] > 0


def test_stand_ins_are_not_logged(session: shoal.Session) -> None:
    """The last step has one sample and seven parts without one."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "eval_strategy": "no",
    }
    data = {"train_dataset": transformers_bodies.sentences(9)}
    ours = SessionTrainer(session, **(inputs_of(**options) | data))
    plain = Trainer(**(inputs_of(**options) | data))
    ours.train()
    plain.train()
    losses, expected = (
        [each["loss"] for each in trainer.state.log_history if "loss" in each]
        for trainer in (ours, plain)
    )
    assert losses == pytest.approx(expected, abs=1e-3)


def test_a_checkpoint_of_trainers_own_is_refused(session: shoal.Session) -> None:
    with pytest.raises(InvalidSpec, match="resume_from_checkpoint"):
        SessionTrainer(session, **inputs_of()).train(resume_from_checkpoint=True)


def translating(directory: Path) -> dict[str, Any]:
    """Arguments of a Seq2SeqTrainer whose evaluation generates."""
    size = {"d_model": 8, "max_position_embeddings": 16, "vocab_size": VOCABULARY, "dropout": 0.0}
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_{n}": v for n, v in (("layers", 1), ("attention_heads", 1))}
        sides[f"{side}_ffn_dim"] = 8
    torch.manual_seed(0)
    args = Seq2SeqTrainingArguments(
        output_dir=str(directory),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        predict_with_generate=True,
        generation_max_length=6,
        label_smoothing_factor=0.1,
        train_sampling_strategy="sequential",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    return {
        **inputs_of(),
        "model": BartForConditionalGeneration(BartConfig(**size, **sides)),
        "args": args,
        "compute_metrics": lambda found: {"tokens": int(found.predictions.sum())},
    }


@pytest.mark.long
def test_an_evaluation_generates_as_that_of_one_process(
    session: shoal.Session, tmp_path: Path
) -> None:
    plain, elastic = (
        Seq2SeqTrainer(**translating(tmp_path)),
        SessionSeq2SeqTrainer(session, **translating(tmp_path)),
    )
    for each in (plain, elastic):
        each.train()
    found, expected = (each.evaluate() for each in (elastic, plain))
    assert found["eval_tokens"] == expected["eval_tokens"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)


def test_a_trainer_that_would_not_generate_is_refused(
    session: shoal.Session, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec, match=r"predict_with_generate.*SessionSeq2SeqTrainer"):
        SessionTrainer(session, **translating(tmp_path))


class Followed(TrainerCallback):
    """Records the rate after each step, and the epoch that Trainer shows."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(given["lr_scheduler"].get_last_lr()[0])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs.append(state.epoch)


@pytest.mark.long
@pytest.mark.parametrize(("batch_size", "num_steps"), [(4, 22), (16, 6)])
def test_a_checkpoint_of_another_batch_size_is_trained_to_the_end_of_the_samples(
    tmp_path: Path, batch_size: int, num_steps: int
) -> None:
    """46 samples, 3 epochs, batches of 8 up to step 7: the second epoch has 38 samples left. The
    schedule falls to 0 in the job's last step, and not before."""
    options = {"gradient_accumulation_steps": 1, "eval_strategy": "no", "warmup_steps": 0}
    options["lr_scheduler_type"] = "linear"
    for size, epochs, every_steps in ((8, 2, 7), (batch_size, 3, 100)):
        with shoal.join() as session:
            inputs = inputs_of(per_device_train_batch_size=size, num_train_epochs=epochs, **options)
            followed = Followed()
            trainer = SessionTrainer(
                session,
                **inputs,
                callbacks=[followed],
                checkpoints=shoal.Checkpoints(tmp_path, every_steps=every_steps),
            )
            trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == session.step_number
    assert len(followed.rates) == num_steps
    assert session.step_number == 7 + len(followed.rates)
    assert followed.epochs == [2.0, 3.0]
    assert followed.rates[-1] == 0.0
    assert all(now < before for before, now in pairwise(followed.rates))


@pytest.mark.long
def test_max_steps_beyond_the_samples_of_its_epochs_is_refused(tmp_path: Path) -> None:
    """Batches are smaller than before the change: the planned epochs have too few steps."""
    options = {"gradient_accumulation_steps": 1, "eval_strategy": "no"}
    with pytest.raises(InvalidSpec, match="max_steps=12"):
        for size, max_steps, every_steps in ((8, 8, 7), (4, 12, 100)):
            with shoal.join() as session:
                inputs = inputs_of(per_device_train_batch_size=size, max_steps=max_steps, **options)
                checkpoints = shoal.Checkpoints(tmp_path, every_steps=every_steps)
                SessionTrainer(session, **inputs, checkpoints=checkpoints).train()
