"""A small GPT-2 of transformers, trained in a script without any Shoal code.

torchrun starts it with the name of a framework and a directory for checkpoints. A global batch has
the same samples on any number of ranks. So the final weights are those of one process, whichever
checkpoints the restarts continued from.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

EPOCHS, GLOBAL_BATCH, NUM_SENTENCES = 12, 8, 160
VOCABULARY, LENGTH, RATE = 29, 12, 0.1


def network() -> GPT2LMHeadModel:
    """Make a model whose head shares the embedding's weight."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def sentences() -> list[dict[str, Tensor]]:
    """Make sentences that count up from a random start, in steps of 1 to 3. The first token is not
    a label, as Trainer would count it in the mean of the loss."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (NUM_SENTENCES, 1), generator=generator)
    strides = torch.randint(1, 4, (NUM_SENTENCES, 1), generator=generator)
    tokens = (starts + strides * torch.arange(LENGTH)) % VOCABULARY
    labels = tokens.clone()
    labels[:, 0] = -100
    pairs = zip(tokens, labels, strict=True)
    return [{"input_ids": given, "labels": wanted} for given, wanted in pairs]


def say(epoch: int, ranks: int, loss: float) -> None:
    print(f"epoch {epoch} on {ranks} ranks: loss {loss:.4f}", flush=True)


def one_process() -> Mapping[str, Tensor]:
    """Return the weights after a plain loop."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for batch in DataLoader(sentences(), GLOBAL_BATCH):  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return weights_of(model)


def weights_of(model: Any) -> Mapping[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def by_trainer(checkpoints: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415 - slow

    class Saying(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if state.is_world_process_zero and "loss" in logs:
                say(round(state.epoch) - 1, args.world_size, logs["loss"])

    ranks = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=2,
        # Keeps the global batch, and so the number of steps in an epoch, on any number of ranks.
        gradient_accumulation_steps=GLOBAL_BATCH // (2 * ranks),
        num_train_epochs=EPOCHS,
        learning_rate=RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="epoch",
        logging_strategy="epoch",
        disable_tqdm=True,
        use_cpu=True,
    )
    # A worker may be lost while a checkpoint is written. Trainer's state is written last.
    whole = [path.parent for path in checkpoints.glob("checkpoint-*/trainer_state.json")]
    newest = max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
    trainer = Trainer(
        model=network(),
        args=arguments,
        train_dataset=sentences(),  # type: ignore[arg-type]
        callbacks=[Saying()],
    )
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if trainer.is_world_process_zero():
        torch.save(weights_of(trainer.model), checkpoints / "final.pt")


def by_lightning(checkpoints: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer  # noqa: PLC0415 - slow
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415 - slow

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def on_train_epoch_end(self) -> None:
            if self.trainer.is_global_zero:
                loss = float(self.trainer.callback_metrics["loss"])
                say(self.current_epoch, self.trainer.world_size, loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    module = Module()
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=local,
        num_nodes=ranks // local,
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(checkpoints, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        # Lightning's own sampler shuffles.
        use_distributed_sampler=False,
    )
    data: Any = sentences()
    share = DistributedSampler(data, ranks, int(os.environ["RANK"]), shuffle=False)
    batches = DataLoader(data, GLOBAL_BATCH // ranks, sampler=share)
    trainer.fit(module, batches, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(weights_of(module.model), checkpoints / "final.pt")


def by_accelerate(checkpoints: Path) -> None:
    from accelerate import Accelerator  # noqa: PLC0415 - slow

    accelerator = Accelerator(cpu=True)
    ranks = accelerator.num_processes
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(sentences(), GLOBAL_BATCH // ranks)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = sorted(checkpoints.glob("epoch-*"))
    if done:
        accelerator.load_state(str(done[-1]))
    for epoch in range(len(done), EPOCHS):
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean: Any = accelerator.reduce(torch.stack(losses).mean(), "mean")
        # Renamed once it is complete, as a worker may be lost while it is written.
        accelerator.save_state(str(checkpoints / "unfinished"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (checkpoints / "unfinished").rename(checkpoints / f"epoch-{epoch:03d}")
            say(epoch, ranks, float(mean))
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(weights_of(accelerator.unwrap_model(model)), checkpoints / "final.pt")
    accelerator.end_training()


FRAMEWORKS: Mapping[str, Callable[[Path], None]] = {
    "Trainer": by_trainer,
    "Lightning": by_lightning,
    "accelerate": by_accelerate,
}

if __name__ == "__main__":
    FRAMEWORKS[sys.argv[1]](Path(sys.argv[2]))
