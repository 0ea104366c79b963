"""Commands and programs in the documentation exist."""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts.exceptions import CycloptsError
from support.docs.pages import blocks, name_of, pages, prose

from shoal_client.cli import build_app, installed_commands, read_config
from shoal_proto.tls import local_clusters

COMMANDS = installed_commands()
INLINE = re.compile(r"`shoal ([a-z][^`]*)`", re.DOTALL)
PLACES = {"MEMBER": "m-0", "JOB": "j", "NAME": "j", "DIRECTORY": "/tmp", "COMMAND": "status"}


def lines(page: Path) -> Iterator[str]:
    """Commands that a reader would type, one each."""
    for block in blocks(page, "sh", "bash", ""):
        for line in block.replace("\\\n", " ").splitlines():
            # Parts in brackets are optional.
            yield re.sub(r"\s#.*| > .*|\[[^\]]*\]", "", line).strip()


def typed(page: Path) -> Iterator[list[str]]:
    """Calls of `shoal` in blocks, without the variables that are set before them."""
    for line in lines(page):
        words = line.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words[:1] == ["shoal"]:
            text = " ".join(words).replace("HOST:", "h:").replace("host:", "h:")
            yield [PLACES.get(word, word) for word in shlex.split(text)[1:]]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_commands_in_blocks_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself parses the commands with all their options."""
    # Other tests may run clusters at the same time.
    monkeypatch.setattr(local_clusters, "running", list)
    wrong = []
    for words in typed(page):
        try:
            read_config(words, COMMANDS)
        except (CycloptsError, ValueError) as error:
            wrong.append(f"shoal {shlex.join(words)}: {error}")
    assert wrong == []


def test_blocks_have_many_commands() -> None:
    assert sum(len(list(typed(page))) for page in pages()) > 30


def test_commands_and_options_in_the_text_are_known() -> None:
    """Find each `shoal COMMAND --option` that a sentence names."""
    app = build_app(COMMANDS)
    options = {
        name: {option for each in app[name].assemble_argument_collection() for option in each.names}
        for name in COMMANDS
    }
    wrong, num_seen = [], 0
    for page in pages():
        for call in INLINE.findall(prose(page)):
            words = call.split()
            num_seen += 1
            for name in words[0].split("|"):
                if name not in COMMANDS:
                    wrong.append(f"{name_of(page)}: shoal {call}")
                    continue
                given = {word.partition("=")[0] for word in words if word.startswith("--")}
                unknown = given - options[name] - {"--help", "--"}
                if unknown and name != "run":
                    wrong.append(f"{name_of(page)}: shoal {call}: {sorted(unknown)}")
    assert num_seen > 100
    assert wrong == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_python_blocks_parse(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(textwrap.dedent(block))
