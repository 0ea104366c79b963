"""The reading radius of a module: the source modules that it imports, directly or through others.

    python tests/structure/reading_radius.py ddp

prints how many modules and lines a reader may have to open. Imports inside functions count.
Imports under `if TYPE_CHECKING:` are left out of the first figure and counted in the second.
A package counts with its `__init__.py`, and only if a name is imported from it. Generated code
does not count.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "shoal_proto": ROOT / "proto",
    "shoal_difference": ROOT / "proto",
    "shoal_client": ROOT / "client",
    "shoal": ROOT / "worker",
    "shoal_server": ROOT / "server",
}


@cache
def modules() -> Mapping[str, Path]:
    """Source modules by name, without generated code; a package stands for its `__init__`."""
    found = {}
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            if "_pb2" not in path.name:
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def walked(path: Path) -> tuple[ast.AST, ...]:
    """Nodes of a module's syntax tree."""
    return tuple(ast.walk(parsed(path)))


def imported(path: Path, *, with_types: bool = True) -> Iterator[str]:
    """Names of the source modules in a module's import statements; `with_types`: blocks of `if
    TYPE_CHECKING:` included."""
    apart = set() if with_types else _type_checking(path)
    for node in walked(path):
        names = []
        if node in apart:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if name in modules() else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        yield from (name for name in names if name in modules())


def _type_checking(path: Path) -> set[ast.AST]:
    """Nodes that only a type checker reads."""
    return {
        inner
        for node in walked(path)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for each in node.body
        for inner in ast.walk(each)
    }


@dataclass(frozen=True, kw_only=True)
class Radius:
    """The modules that a reader of one module may have to open, the module itself included."""

    modules: frozenset[str]

    @property
    def num_lines(self) -> int:
        return sum(map(num_lines, self.modules))


def radius(module: str, *, with_types: bool = False) -> Radius:
    """The reading radius of a source module by its full name."""
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += imported(modules()[name], with_types=with_types)
    return Radius(modules=frozenset(found))


def num_lines(module: str) -> int:
    return modules()[module].read_text().count("\n")


def named(name: str) -> str:
    """The module with that full name, or the only one whose name ends with it."""
    found = [each for each in modules() if each == name or each.endswith(f".{name}")]
    if len(found) != 1:
        sys.exit(f"{name}: expected one module, seen {', '.join(sorted(found)) or 'none'}")
    return found[0]


def main() -> None:
    module = named(sys.argv[1])
    found, typed = radius(module), radius(module, with_types=True)
    for name in sorted(found.modules):
        print(f"{num_lines(name):6,} {name}")
    print(f"{module}: {len(found.modules)} modules, {found.num_lines:,} lines")
    print(f"with TYPE_CHECKING blocks: {len(typed.modules)} modules, {typed.num_lines:,} lines")


if __name__ == "__main__":
    main()
