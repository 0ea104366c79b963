"""Promises of the documentation each name a test that exists."""

import ast
import re

from support.docs.pages import DOCS, ROOT

PAGE = DOCS / "guarantees.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_promise_names_a_test_that_exists() -> None:
    text = PAGE.read_text().partition("## What is not guaranteed")[0]
    promises = [part for part in text.split("\n\n") if part.startswith("**")]
    assert len(promises) > 20
    assert [part for part in promises if not NAMED.search(part)] == []
    missing = []
    for path, test in NAMED.findall(text):
        file = ROOT / path
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        if test not in {node.name for node in tree.body if isinstance(node, kinds)}:
            missing.append(f"{path}::{test}")
    assert missing == []
