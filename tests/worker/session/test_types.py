"""Types of the values that `session.distribute` returns, as editors and type checkers see them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
from typing import assert_type

from torch import nn
from torch.optim import SGD, AdamW

import shoal


class Net(nn.Module):
    width = 3


def train(session: shoal.Session, net: Net, head: nn.Linear, adam: AdamW, sgd: SGD) -> None:
    model, optimizer = session.distribute(net, adam, strategy="fsdp", keyed_dropout=False)
    assert_type(model, Net)
    assert_type(optimizer, AdamW)
    both, (first, _) = session.distribute([net, net], (adam, sgd))
    assert_type(both, list[Net])
    assert_type(first, AdamW)
    named, optimizers = session.distribute({"g": head}, {"g": sgd}, shoal.FSDP())
    assert_type(named, dict[str, nn.Linear])
    assert_type(optimizers, dict[str, SGD])
    session.distribute(net, adam, stratgy="ddp")
"""


@pytest.mark.long
def test_distribute_returns_the_types_of_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--explicit-package-bases", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wrong = {line.split(":")[1] for line in done.stdout.splitlines() if "train.py:" in line}
    misspelt = SCRIPT[: SCRIPT.index("stratgy")].count("\n") + 1
    assert wrong == {str(misspelt)}, done.stdout + done.stderr
