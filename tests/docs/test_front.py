"""The first things that a reader sees: README, navigation, the box at the head of long pages."""

import re
from collections.abc import Iterator

from support.docs.pages import DOCS, ROOT, prose

BOX = "> **Most people need this**\n>\n"
LONG_WORDS = 2000
READ_AS_A_WHOLE = ("architecture.md", "decisions/")
NAV = re.compile(r"^( +)- (?:[^\n]*: )?(\S+\.md)$", re.MULTILINE)
GROUP = re.compile(r"^  - (.+):$", re.MULTILINE)


def navigation() -> str:
    return (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def long_pages() -> Iterator[str]:
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).as_posix()
        if len(page.read_text().split()) > LONG_WORDS and not name.startswith(READ_AS_A_WHOLE):
            yield name


def test_the_readme_is_short_and_shows_a_job_that_survives() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 120
    assert "](docs/benchmarks/survival.svg)" in text


def test_every_page_is_in_one_place_of_the_navigation() -> None:
    """Pages stand in one of the four groups; the first page stands before them."""
    assert GROUP.findall(navigation()) == [
        "Tutorials",
        "How-to guides",
        "Reference",
        "Explanation",
    ]
    named = [name for _, name in NAV.findall(navigation()) if not name.startswith("reference/")]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_a_long_page_begins_with_what_most_people_need() -> None:
    """The box has three to eight lines, right below the title."""
    names = list(long_pages())
    assert len(names) > 10
    wrong = []
    for name in names:
        below = prose(DOCS / name).partition("\n")[2].lstrip("\n")
        box = below.partition("\n\n")[0].splitlines()
        if not below.startswith(BOX) or len(box) > 10:
            wrong.append(name)
    assert wrong == []
