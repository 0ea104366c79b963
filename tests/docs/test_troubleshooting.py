"""Errors that a user can meet each have a section with their name."""

import ast
from collections.abc import Iterator

import pytest
from support.docs.pages import DOCS, ROOT, anchors

import shoal
from shoal_client.cli import main
from shoal_proto import errors

PAGE = DOCS / "troubleshooting.md"
SOURCES = ("proto", "client", "worker", "server")


def classes() -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each class in the source, with the names of its bases."""
    for part in SOURCES:
        for path in (ROOT / part).rglob("*.py"):
            if "_pb2" in path.name:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, {each.id for each in node.bases if isinstance(each, ast.Name)}


def shoal_errors() -> set[str]:
    """Names of the classes that derive from ShoalError, in any module."""
    known, found = dict(classes()), {"ShoalError"}
    while more := {name for name, bases in known.items() if bases & found} - found:
        found |= more
    return found


@pytest.mark.long
def test_every_error_has_a_section_under_its_name() -> None:
    """Sections with another name than an error's, or `Drained`, are refused."""
    names = shoal_errors()
    assert len(names) > 50
    assert {errors.JobFinished.__name__, "NotStarted"} <= names
    explained = {name for name in names if name.lower() in anchors(PAGE)}
    assert names - explained == set()
    sections = [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("### ")]
    assert set(sections) == names | {shoal.Drained.__name__}


def test_a_section_has_more_than_the_name() -> None:
    parts = PAGE.read_text().split("\n### ")[1:]
    short = [part.splitlines()[0] for part in parts if len(part.partition("\n## ")[0]) < 40]
    assert short == []


def test_the_command_prints_the_name_to_look_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The name stands in brackets at the end of the message."""
    assert main(["status", "--http", "127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.rstrip().endswith("[Unavailable]")
