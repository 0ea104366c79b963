"""Words of the glossary occur in the docs or the code, and each has one row."""

import re
from collections import Counter
from functools import cache
from itertools import chain

from structure.reading_radius import ROOT, modules

GLOSSARY = ROOT / "docs" / "glossary.md"
SEVERAL = {"layout"}
"""Words with a row for each of two things: the layout of a model, and that of published weights."""


def entries() -> list[str]:
    """Words in bold in the first column, without the "to" of a verb."""
    rows = re.findall(r"^\| (\*\*.*?) \|", GLOSSARY.read_text(), re.MULTILINE)
    return [
        word.removeprefix("to ")
        for row in rows
        for part in re.findall(r"\*\*(.+?)\*\*", row)
        for word in part.split(", ")
    ]


@cache
def used() -> str:
    """The text of the source and of the other docs, in lower case, with single spaces between
    words."""
    docs = (path for path in ROOT.glob("docs/**/*.md") if path != GLOSSARY)
    text = " ".join(path.read_text() for path in chain(docs, modules().values()))
    return re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def test_each_word_of_the_glossary_is_used() -> None:
    """A reader does not look up a word that neither the docs nor the source contain."""
    words = {part for word in entries() for part in re.split(r"[ -]", word.lower())}
    found = [word for word in sorted(words) if word not in used()]
    assert found == []


def test_each_word_of_the_glossary_has_one_row() -> None:
    assert {word for word, count in Counter(entries()).items() if count > 1} == SEVERAL
