"""Lightning: a module, a schedule by the epoch, clipping and accumulated batches."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.lightning import SessionStrategy

NUM_SAMPLES, BATCH, PARTS, EPOCHS = 1280, 16, 2, 8


class Classifier(LightningModule):
    def __init__(self, session):
        super().__init__()
        self.session = session
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch):
        inputs, labels = batch
        return cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        self.layers, optimizer = self.session.distribute(self.layers, optimizer)
        return [optimizer], [schedule]


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    quiet = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    with shoal.join() as session:
        module, strategy = Classifier(session), SessionStrategy(session)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_epochs=EPOCHS,
            accumulate_grad_batches=PARTS,
            gradient_clip_val=1.0,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(module, strategy.batches(DataLoader(samples(), BATCH * PARTS)))
        if session.is_first:
            torch.save(module.layers.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
