"""Maps of the source in the documentation name every folder."""

import re
import subprocess

import pytest
from support.docs.pages import DOCS, ROOT

ARCHITECTURE, TESTING = DOCS / "architecture.md", DOCS / "testing.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def folders(under: str = "") -> set[str]:
    """Return the folders in this folder in which git tracks files."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT / under, capture_output=True, text=True, check=True)
    paths = listed.stdout.split("\0")
    return {path.partition("/")[0] for path in paths if "/" in path}


def named(text: str) -> set[str]:
    return {name.rstrip("/") for name in re.findall(r"`([^` ]+/)`", text)}


@pytest.mark.parametrize(
    "package",
    ["proto/shoal_proto", "client/shoal_client", "worker/shoal", "server/shoal_server"],
)
def test_the_map_of_the_source_names_each_folder_of_a_package(package: str) -> None:
    page = ARCHITECTURE.read_text().partition("## The map")[2].partition("\n## ")[0]
    table = page.partition(f"| `{package}/` |")[2].partition("\n\n")[0]
    assert folders(package) - named(table) == set()


def test_the_page_on_tests_names_each_folder_of_tests() -> None:
    """The page describes the folders that mirror the source together, not one by one."""
    page = TESTING.read_text().partition("## Where to find what")[2]
    mirrors = {"proto", "client", "worker", "server"}
    assert folders("tests") - mirrors - {"support"} - named(page) == set()
    assert folders("tests/support") - named(page.partition("| folder |")[2]) == set()


def test_the_map_for_contributors_names_each_folder() -> None:
    assert folders() - named(CONTRIBUTING.read_text()) == set()
