"""Handwritten digits with Lightning in a session: workers may come and go while it trains.

shoal run -n 3 examples/lightning_elastic.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal.integrations.lightning import SessionStrategy

EPOCHS, BATCH_SIZE = 20, 96


class Digits(LightningModule):
    def __init__(self, session: shoal.Session) -> None:
        super().__init__()
        self.session = session
        self.layers: nn.Module = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def on_train_epoch_end(self) -> None:
        session = self.session
        print(
            f"rank {session.rank} of {session.world_size} at step {session.step_number}", flush=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=3e-3)
        self.layers, optimizer = self.session.distribute(self.layers, optimizer, strategy="ddp")
        return optimizer


bunch = load_digits()
images = torch.tensor(bunch.data / 16, dtype=torch.float32)
labels = torch.tensor(bunch.target)

with shoal.join() as session:
    elastic = SessionStrategy(session)
    trainer = Trainer(
        strategy=elastic,
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Digits(session)
    trainer.fit(module, elastic.batches((images, labels), global_batch_size=BATCH_SIZE))
    module.eval()
    with torch.no_grad():
        right = float((module.layers(images).argmax(dim=1) == labels).float().mean())
    print(f"rank {session.rank}: {right:.1%} correct after {session.step_number} steps")
