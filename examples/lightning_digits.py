"""Handwritten digits with Lightning. The script does not use Shoal itself.

torchrun --rdzv-backend=shoal --rdzv-endpoint=HOST:7700 --rdzv-id=digits --nnodes=1:4 \
         --nproc-per-node=1 --max-restarts=3 examples/lightning_digits.py CHECKPOINTS
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE = 12, 32


class Digits(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"]
        ranks = self.trainer.world_size
        self.print(f"epoch {self.current_epoch} on {ranks} ranks: loss {loss:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


bunch = load_digits()
pixels = torch.tensor(bunch.data / 16, dtype=torch.float32)
digits = TensorDataset(pixels, torch.tensor(bunch.target))

local_world = int(os.environ["LOCAL_WORLD_SIZE"])
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    # The current number of workers: Lightning refuses numbers that differ from torchrun's.
    devices=local_world,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local_world,
    max_epochs=EPOCHS,
    callbacks=[ModelCheckpoint(sys.argv[1], save_last=True)],
    logger=False,
    enable_progress_bar=False,
)
# "last" is the newest checkpoint, if there is one: restarted workers continue from it.
trainer.fit(Digits(), DataLoader(digits, BATCH_SIZE, shuffle=True), ckpt_path="last")
