"""Fragments of programs in the documentation, each run with the names that its page assumes."""

import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from support.docs.pages import DOCS, blocks
from torch import nn
from torch.nn.functional import cross_entropy

import shoal

TRAINS = "session.backward(loss_fn(model(batch.inputs), batch.targets))"
BATCHES = "session.batches(dataset, global_batch_size=16)"
DISTRIBUTES = "model, optimizer = session.distribute(model, optimizer)\n"
LOOP = f"for batch in {BATCHES}:\n"
IN_STEP = LOOP + "    with session.step():\n"
ONE_STEP = f"""
for batch in {BATCHES}:
    with session.step():
        {TRAINS}
"""
GAN = """
g, d = nn.Linear(8, 8), nn.Linear(8, 1)
opt_g, opt_d = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (g, d))
dataset = (dataset[0], dataset[0])
d_loss = lambda real, fake: (fake - real).mean()
g_loss = lambda fake: -fake.mean()
"""

BY_EPOCHS = f"""
{DISTRIBUTES}
schedule = session.register("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 1))
steps_per_epoch = 1
"""

CLIP = f"""
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.images, self.texts = nn.Linear(8, 4), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, images, texts):
        return self.images(images), self.texts(texts), self.scale.exp()
model = Clip()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = (dataset[0], dataset[0])
{DISTRIBUTES}
"""


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


def run(fragment: str, before: str, after: str, directory: Path) -> dict[str, Any]:
    """Run the fragment, with a training step for `...`, in a session without other members."""
    code = fragment.replace("session.batches(...)", BATCHES)
    code = code.replace("session.batches(...", BATCHES[:-1])
    code = re.sub(r"^( +)\.\.\.$", rf"\1{TRAINS}", code, flags=re.MULTILINE)
    code = code.replace("/shared/runs", str(directory)).replace('"runs"', f'"{directory}"')
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "shoal": shoal,
        "cross_entropy": cross_entropy,
        "dataset": (torch.randn(64, 8), torch.randint(0, 4, (64,))),
        "test_set": (torch.randn(32, 8), torch.randint(0, 4, (32,))),
        "model": model,
        "optimizer": optimizer,
        "loss_fn": cross_entropy,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0),
    }
    if "shoal.join(" in code:
        code = code.replace("shoal.join(", f'shoal.join("docs-{secrets.token_hex(3)}", ')
        exec(before + code + after, names)
        return names
    with shoal.join("docs") as session:
        names["session"] = session
        exec(before + code + after, names)
        names["steps"] = session.step_number
    return names


SCHEDULES = """
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
"""
DRAWS = """
def draw(seed):
    torch.manual_seed(seed)
    return torch.randn(16, 8), torch.randint(0, 4, (16,))
"""
BAR = """
class Bar:
    def set_postfix(self, loss): self.loss = loss
bar = Bar()
"""
RAN = {
    ("checkpoints.md", 0): ("", ONE_STEP),
    ("contrastive.md", 0): (CLIP, ""),
    ("contrastive.md", 1): (CLIP, ""),
    ("contrastive.md", 2): (CLIP, ""),
    ("data.md", 0): (DISTRIBUTES + "dataset = torch.utils.data.TensorDataset(*dataset)\n", ""),
    ("logging.md", 0): ("", ""),
    ("loop.md", 0): (DISTRIBUTES, ""),
    ("loop.md", 1): (DISTRIBUTES + BAR + LOOP, "\nassert 0 < bar.loss < 3\n"),
    ("loop.md", 2): (DISTRIBUTES + DRAWS, ""),
    ("loop.md", 3): (DISTRIBUTES + LOOP, ""),
    ("loop.md", 6): (DISTRIBUTES + "rate = lambda step: 0.1 / (step + 1)\n", ""),
    ("loop.md", 7): (BY_EPOCHS, "\nassert schedule.last_epoch > 0\n"),
    ("loop.md", 8): (SCHEDULES, ""),
    ("loop.md", 9): (DISTRIBUTES, ""),
    ("membership.md", 1): (DISTRIBUTES + "evaluate = print\n", ""),
    ("models.md", 0): (GAN, ""),
    ("models.md", 1): ('model.__dict__["backbone"] = model[0]\n' + DISTRIBUTES, ""),
}
"""Code before and after the fragment, by page and number among the page's blocks of Python."""


@pytest.mark.long
@pytest.mark.parametrize(("page", "number"), RAN, ids=str)
def test_a_fragment_runs(page: str, number: int, tmp_path: Path) -> None:
    """The fragment runs to its end; one with a loop takes steps."""
    before, after = RAN[page, number]
    # A block of two fragments in a row shows two alternatives: the first is run.
    fragment = [*blocks(DOCS / page, "python")][number]
    if before.endswith(LOOP):
        fragment = fragment if fragment.startswith(" ") else indented(fragment, 4)
    if page == "loop.md" and number == 6:
        after = f"    with session.step():\n        {TRAINS}\n"
    names = run(fragment, before, after, tmp_path)
    assert names.get("steps", 1) > 0
