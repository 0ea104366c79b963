"""The language of the source: what docstrings and messages open with, and phrases to avoid."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from structure.reading_radius import ROOT, modules, walked

# fmt: off
OPENINGS = frozenset({
    "who", "whom", "whose", "whoever", "what", "whatever", "which", "whichever", "whether", "where",
    "when", "how", "as", "of", "for", "by", "if", "in", "on", "at", "to", "from", "with", "without",
    "within", "before", "after", "behind", "beside", "it", "its", "they", "them", "their", "those",
    "these", "that", "there", "one", "he", "she", "his", "her", "nobody", "somebody", "someone",
})
PRONOUNS = frozenset({
    "it", "its", "itself", "they", "them", "their", "theirs", "he", "him", "she", "her", "his",
    "those", "who", "whom", "whose", "whoever", "whatever", "whichever", "somebody", "someone",
    "nobody", "nothing", "everybody", "everyone", "anybody", "anyone", "others", "another",
})
LOGS = frozenset({"debug", "info", "warning", "error", "exception"})
TEXTS = frozenset({"what", "seen", "expected", "fix", "reason", "help", "detail"})
# fmt: on
PHRASES = (
    "gone back on",
    "let go of",
    "lets go of",
    "comes of",
    "is told of",
    "taken for",
    "behind a call",
    "behind a commit",
    "behind a step",
)
MESSAGE_PHRASES = (*PHRASES, "of which", "whom", "whoever", "behind", "heard of", "stands by")
"""Phrases that no message may contain: PHRASES, and those that leave out the subject."""
MAX_PRONOUNS, MIN_WORDS = 0.25, 8
"""The largest part of a docstring's words that may be pronouns, and the length from which this is
checked."""
LEFT_PHRASES: dict[str, int] = {}
"""Number of lines that may contain each phrase."""
LEFT_MESSAGES: dict[str, str] = {}
"""Messages that contain one of these phrases, each with the reason."""


def docstrings(path: Path) -> Iterator[str]:
    """Yield docstrings of modules, classes, functions, and attributes (a string by itself)."""
    for node in walked(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    yield " ".join(str(each.value.value).split())


@cache
def messages(path: Path) -> tuple[str, ...]:
    """Texts that people see: in `raise`, in a log call, and in the parts of an error or of an
    option."""
    found: dict[tuple[int, int], str] = {}
    for node in walked(path):
        roots: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            roots = [node.exc]
        elif isinstance(node, ast.Call):
            of_log = isinstance(node.func, ast.Attribute) and node.func.attr in LOGS
            roots = [node] if of_log else [k.value for k in node.keywords if k.arg in TEXTS]
        for root in roots:
            for each in ast.walk(root):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    found[each.lineno, each.col_offset] = " ".join(each.value.split())
    return tuple(found.values())


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", re.sub(r"`[^`]*`", "code", text).lower())


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    """Pronouns, prepositions and question words make a reader guess the subject."""
    found = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path in modules().values()
        for text in docstrings(path)
        # A name in backticks is a noun.
        if text.split()[0].strip(".,:;'\"()").lower() in OPENINGS
    ]
    assert found == []


def test_docstrings_name_their_subjects() -> None:
    """A sentence with more than a quarter of pronouns has to be read twice."""
    found = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path in modules().values()
        for text in docstrings(path)
        if len(words := words_of(text)) >= MIN_WORDS
        if sum(word in PRONOUNS for word in words) > MAX_PRONOUNS * len(words)
    ]
    assert found == []


def test_phrases_have_plain_words() -> None:
    lines = [line for path in modules().values() for line in path.read_text().splitlines()]
    found = {
        phrase: sum(re.search(rf"\b{phrase}\b", line) is not None for line in lines)
        for phrase in PHRASES
    }
    assert {phrase: n for phrase, n in found.items() if n > LEFT_PHRASES.get(phrase, 0)} == {}


def test_messages_have_plain_words() -> None:
    """An operator reads in a log line or an error what was seen, without pictures."""
    pattern = re.compile(r"\b(" + "|".join(MESSAGE_PHRASES) + r")\b")
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in modules().values()
        for text in messages(path)
        if pattern.search(text) and text not in LEFT_MESSAGES
    ]
    assert found == []
