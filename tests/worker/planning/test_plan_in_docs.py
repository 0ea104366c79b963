"""The plan shown in the docs is the one that their lines print."""

import re
from pathlib import Path

import torch
from torch import nn

import shoal

DOCUMENT = Path(__file__).parents[3] / "docs" / "strategies.md"


def test_the_table_shown_is_the_table_printed(capsys) -> None:
    section = DOCUMENT.read_text().partition("## What it will cost")[2]
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    exec(found[1], {"shoal": shoal, "torch": torch, "nn": nn})
    assert found[2] in capsys.readouterr().out
