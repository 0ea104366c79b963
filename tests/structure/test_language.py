"""The language of the source: what a docstring opens with, and phrases that have plain words."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from structure.reading_radius import ROOT, modules, parsed

# fmt: off
OPENINGS = frozenset({
    "who", "whom", "whose", "whoever", "what", "whatever", "which", "whichever", "whether", "where",
    "when", "how", "as", "of", "for", "by", "if", "in", "on", "at", "to", "from", "with", "without",
    "within", "before", "after", "behind", "beside", "it", "its", "they", "them", "their", "those",
    "these", "that", "there", "he", "she", "his", "her", "nobody", "somebody", "someone",
})
# fmt: on
"""Words that no docstring opens with: it opens with a noun or a verb."""
PHRASES = (
    "gone back on",
    "let go of",
    "comes of",
    "is told of",
    "behind a call",
    "behind a commit",
)
LEFT = {
    "client/shoal_client/commands": 2,
    "server/shoal_server/etcd": 1,
    "worker/shoal/backends": 1,
    "worker/shoal/launcher": 2,
}
"""Docstrings by folder that open so: texts of option groups, and the name of a parameter."""
LEFT_PHRASES = {"let go of": 1, "is told of": 1}
"""Lines by phrase that have it: a reason that the wire carries, and the text of an option group."""


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    """Pronouns, prepositions and question words make a reader guess the subject."""
    found: Counter[str] = Counter()
    for path in modules().values():
        folder = "/".join(path.relative_to(ROOT).parts[:3]).removesuffix(".py")
        for text in docstrings(path):
            found[folder] += text.split()[0].strip(".,:;'\"()`").lower() in OPENINGS
    assert {folder: n for folder, n in found.items() if n > LEFT.get(folder, 0)} == {}


def test_phrases_have_plain_words() -> None:
    lines = [line for path in modules().values() for line in path.read_text().splitlines()]
    found = {
        phrase: sum(re.search(rf"\b{phrase}\b", line) is not None for line in lines)
        for phrase in PHRASES
    }
    assert {phrase: n for phrase, n in found.items() if n > LEFT_PHRASES.get(phrase, 0)} == {}
