"""Walks of the documentation: the functions that they name, and their order in a real run.

A walk is a numbered list under a heading that begins with "Walk: ". Each of its lines begins with a
file and a function, both as code: "3. `path/to/file.py` `Class.function`: what happens there".
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from support.docs.pages import ROOT

STAMPING = Path(__file__).parent / "stamping"
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINE = re.compile(r"^ *\d+\. +`([\w/]+\.py)` `([\w.]+)`: \S", re.MULTILINE)
NUMBERED = re.compile(r"^ *\d+\. ", re.MULTILINE)
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)` `(\w[\w.]*)`")


@dataclass(frozen=True)
class Place:
    """A function, or another name, that is defined in a file."""

    path: str
    """Path of the file, relative to the root of the repository."""
    name: str

    def __str__(self) -> str:
        return f"{self.path} {self.name}"


def walks(page: Path) -> dict[str, list[Place]]:
    """Return the walks of a page, by heading."""
    parts = HEADING.split(page.read_text())
    found = {}
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if heading.startswith("Walk: "):
            found[heading] = [Place(*each) for each in LINE.findall(text)]
            assert len(found[heading]) == len(NUMBERED.findall(text)), f"a line of {heading}"
    return found


def named(page: Path) -> list[Place]:
    """Return every pair of a file and a name in it that a page gives next to each other."""
    return [Place(*each) for each in NAMED.findall(page.read_text())]


@cache
def defined(path: str) -> frozenset[str]:
    """Return the names that a file defines: functions, classes, and attributes with a value or
    type."""
    return frozenset(_defined(ast.parse((ROOT / path).read_text()).body, ""))


def _defined(body: Sequence[ast.stmt], within: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield within + node.name
            case ast.ClassDef():
                yield within + node.name
                yield from _defined(node.body, f"{within}{node.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield within + name


def exists(place: Place) -> bool:
    """True if the file exists and defines the name."""
    return (ROOT / place.path).is_file() and place.name in defined(place.path)


@dataclass(frozen=True)
class Stamp:
    """A call of a named function."""

    at_ns: int
    """Time by CLOCK_MONOTONIC, which all processes of a machine share."""
    pid: int
    place: Place


class Stamps:
    """The stamps of all processes that run with `environment`."""

    def __init__(self, directory: Path, places: Sequence[Place], *, is_apart: bool = False) -> None:
        """`is_apart`: processes reach each other as if each were on a separate host."""
        by_path: dict[str, list[str]] = {}
        for place in places:
            by_path.setdefault(str(ROOT / place.path), []).append(place.name)
        self.path = directory / "stamps"
        self.path.touch()
        settings = directory / "stamps.json"
        settings.write_text(
            json.dumps({"named": by_path, "stamps": str(self.path), "is_apart": is_apart})
        )
        self.environment: Mapping[str, str] = {
            "WALK_STAMPS": str(settings),
            "PYTHONPATH": str(STAMPING),
        }

    def all(self) -> list[Stamp]:
        """Return the stamps written so far, in order of time."""
        lines = (line.split(" ") for line in self.path.read_text().splitlines())
        return sorted(
            (
                Stamp(int(at), int(pid), Place(path.removeprefix(f"{ROOT}/"), name))
                for at, pid, path, name in lines
            ),
            key=lambda stamp: stamp.at_ns,
        )


@dataclass(frozen=True)
class Passage:
    """The stamps between two moments of a run."""

    stamps: Sequence[Stamp]

    def between(self, begin_ns: int, end_ns: int) -> Self:
        return type(self)([each for each in self.stamps if begin_ns <= each.at_ns < end_ns])

    def missed(self, walk: Sequence[Place]) -> str:
        """Describe the first line of the walk that the run does not pass after the line before;
        empty if there is none."""
        at = 0
        for number, place in enumerate(walk, start=1):
            later = range(at, len(self.stamps))
            found = next((i for i in later if self.stamps[i].place == place), None)
            if found is None:
                before = f" after line {number - 1}" if number > 1 else ""
                is_entered = any(each.place == place for each in self.stamps)
                return f"line {number}, {place}, is not entered{before if is_entered else ''}"
            at = found + 1
        return ""


__all__ = ["Passage", "Place", "Stamp", "Stamps", "defined", "exists", "named", "walks"]
