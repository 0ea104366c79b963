"""Bodies of members that train with Hugging Face's Trainer in a session."""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from support.frameworks.accelerate_bodies import Held, Run, joined, listed
from support.processes.ranks import Report
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from shoal.integrations.transformers import SessionTrainer

NUM_SENTENCES, VOCABULARY, LENGTH = 46, 23, 8
BATCH, PARTS, EPOCHS = 4, 2, 3
STEPS_PER_EPOCH = -(-NUM_SENTENCES // (BATCH * PARTS))
TRAINER_STEPS = STEPS_PER_EPOCH * EPOCHS


def network() -> GPT2LMHeadModel:
    """Make a model whose head shares the embedding's weight."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def sentences(count: int = NUM_SENTENCES, seed: int = 1) -> list[dict[str, Tensor]]:
    """Make sentences of many lengths, so that a mean over tokens is not a mean over sentences."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        size = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (size,), generator=generator)
        rest = LENGTH - size
        found.append(
            {
                "input_ids": torch.cat([tokens, tokens.new_zeros(rest)]),
                "attention_mask": torch.cat([torch.ones_like(tokens), tokens.new_zeros(rest)]),
                "labels": torch.cat([tokens, tokens.new_full((rest,), -100)]),
            }
        )
    return found


def arguments(**changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": PARTS,
        "num_train_epochs": EPOCHS,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_grad_norm": 0.3,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 4,
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    return TrainingArguments(**options)


def inputs_of(**changes: Any) -> dict[str, Any]:
    return {
        "model": network(),
        "args": arguments(**changes),
        "train_dataset": sentences(),
        "eval_dataset": sentences(10, seed=2),
    }


class Watching(TrainerCallback):
    """Reports attempts of steps, and holds one of them."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._held.tried()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._held.hold()


def train_with_trainer(report: Report, run: Run) -> None:
    with joined(run) as session:
        watching = Watching(Held(session, report, run))
        options = {"strategy": run.strategy, "callbacks": [watching]}
        trainer = SessionTrainer(session, **inputs_of(), **options)
        trainer.train()
        report(
            "finished",
            weights=listed(session.state_dict()),
            step=session.step_number,
            trainer_steps=trainer.state.global_step,
            losses=losses_of(trainer),
        )


def losses_of(trainer: Any) -> list[float]:
    """Return the losses of the evaluations."""
    return [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]


def plain_trainer(**changes: Any) -> tuple[Mapping[str, Tensor], Any]:
    trainer = Trainer(**inputs_of(**changes))
    trainer.train()
    return {name: each.detach() for name, each in trainer.model.state_dict().items()}, trainer
