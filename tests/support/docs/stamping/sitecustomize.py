"""Stamps each entry into the functions that a walk of the documentation names.

Python imports it at its start in every process that has this folder on its path. A named function
is compiled with one more statement at its head, which appends time and name to a common file.
"""

import ast
import json
import os
import socket
import time
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

NAMED: dict[str, list[str]] = {}
"""Qualified names by the file that has them."""
PLAIN = SourceFileLoader.get_code
if _settings := os.environ.get("WALK_STAMPS"):
    with open(_settings, encoding="utf-8") as _file:  # noqa: PTH123 - imports nothing more
        _found = json.load(_file)
    NAMED = _found["named"]
    _STAMPS = os.open(_found["stamps"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class _Remote(socket.socket):
    """A socket that cannot use its own machine's shortcuts, as if each process were on a separate
    host: a push takes another path if the processes share memory."""

    def connect(self, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            raise ConnectionRefusedError(address)
        super().connect(address)


def stamp(name: str) -> None:
    """Write time, process and name, in one piece even if other processes write at that time."""
    os.write(_STAMPS, f"{time.monotonic_ns()} {os.getpid()} {name}\n".encode())


class _Marking(ast.NodeTransformer):
    """Puts the call of `stamp` at the head of the named functions."""

    def __init__(self, path: str) -> None:
        self._path, self._within = path, [""]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit(node, f"{self._within[-1]}{node.name}.")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._mark(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._mark(node)

    def _mark(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        name = f"{self._within[-1]}{node.name}"
        if name in NAMED[self._path]:
            text = f"__import__('sitecustomize').stamp({f'{self._path} {name}'!r})"
            node.body.insert(0, ast.parse(text).body[0])
        return self._visit(node, f"{name}.<locals>.")

    def _visit(self, node: ast.AST, within: str) -> ast.AST:
        self._within.append(within)
        self.generic_visit(node)
        self._within.pop()
        return node


def get_code(self: Any, fullname: str) -> CodeType | None:
    """The module's code, recompiled if it has named functions."""
    path = self.get_filename(fullname)
    if path not in NAMED:
        return PLAIN(self, fullname)
    tree = _Marking(path).visit(ast.parse(self.get_data(path)))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


if NAMED:
    SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    if _found["is_apart"]:
        socket.socket = _Remote  # type: ignore[misc]
