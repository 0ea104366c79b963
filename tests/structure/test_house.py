"""The house rules of the source: sizes, imports in one direction, one name for one class."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from structure.reading_radius import (
    ROOT,
    imported,
    modules,
    parsed,
    radius,
    walked,
)

MAX_MODULES, MAX_LINES, MAX_ATTRIBUTES = 24, 1000, 20


def test_no_folder_has_many_modules() -> None:
    helpers = (ROOT / "tests" / "support").rglob("*.py")
    counts = Counter(
        path.parent for path in [*modules().values(), *helpers] if path.name != "__init__.py"
    )
    found = {str(path.relative_to(ROOT)): n for path, n in counts.items() if n > MAX_MODULES}
    assert found == {}


def test_no_module_is_long() -> None:
    lines = {name: path.read_text().count("\n") for name, path in modules().items()}
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_no_class_has_many_attributes() -> None:
    """Attributes are the class' fields and the names that its methods assign on `self`."""
    found = {
        f"{name}.{node.name}": len(attributes(node))
        for name, path in modules().items()
        for node in walked(path)
        if isinstance(node, ast.ClassDef) and len(attributes(node)) > MAX_ATTRIBUTES
    }
    assert found == {}


def attributes(node: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    methods = [
        each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return fields | {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def test_packages_have_no_import_cycle() -> None:
    """Imports within functions count, too."""
    known: dict[str, set[str]] = defaultdict(set)
    for name, path in modules().items():
        own = package_of(name)
        known[own] |= {package_of(each) for each in imported(path)} - {own}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_modules_have_no_import_cycle() -> None:
    known = {name: {*imported(path)} - {name} for name, path in modules().items()}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


MAX_RADIUS_MODULES, MAX_RADIUS_LINES = 93, 14_960
"""Reading radius of the strategy "ddp": lower it when the radius shrinks. It may rise only if two
mechanisms become one, as when ddp's own step became the step of all layouts, or a fault is mended,
and never above 110 modules or 15,000 lines."""


def test_the_reading_radius_of_ddp_does_not_grow() -> None:
    found = radius("shoal.strategies.layout.ddp")
    assert len(found.modules) <= MAX_RADIUS_MODULES
    assert found.num_lines <= MAX_RADIUS_LINES


# fmt: off
NO_NOUNS = frozenset({
    "About", "Alone", "Apart", "Asked", "At", "Before", "Behind", "Came", "Deed", "Doing", "Done",
    "Due", "Gone", "Given", "Heard", "Held", "Here", "How", "Kept", "Nowhere", "Over", "Own",
    "Said", "Seen", "Stands", "Taken", "Tell", "There", "Told", "Way", "What", "When", "Where",
    "Whereabouts", "Who", "Why", "Word",
})
# fmt: on
"""Names of classes that do not say what is inside, also with an underscore before them."""


def test_no_two_public_classes_have_one_name() -> None:
    found = Counter(
        node.name
        for path in modules().values()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in found.items() if count > 1] == []


def test_a_class_is_named_with_a_noun() -> None:
    """A reader who has not seen the code guesses from a name what is inside."""
    found = [
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in walked(path)
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in NO_NOUNS
    ]
    assert found == []


def package_of(module: str) -> str:
    is_package = modules()[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


def test_nothing_private_of_argparse_is_used() -> None:
    """Private classes of argparse change between versions of Python."""
    found = []
    for name, path in modules().items():
        for node in walked(path):
            if isinstance(node, ast.ImportFrom) and node.module == "argparse":
                found += [f"{name}: {each.name}" for each in node.names if each.name[0] == "_"]
            of_argparse = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "argparse"
            if of_argparse and node.attr.startswith("_"):  # type: ignore[attr-defined]
                found.append(f"{name}: argparse.{node.attr}")  # type: ignore[attr-defined]
    assert found == []


def test_names_that_benches_and_examples_import_of_the_source_exist() -> None:
    """mypy reads neither folder, and most of these scripts run only by hand."""
    found = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for folder in ("bench", "examples")
        for path in sources_in(folder)
        for module, name in from_source(path)
        if f"{module}.{name}" not in modules() and name not in names_of(modules()[module])
        if not name.endswith("_pb2")
    ]
    assert found == []


def test_names_that_benches_import_of_each_other_exist() -> None:
    """A script's own folder is searched first, then `bench`."""
    bench = ROOT / "bench"
    found = []
    for path in sources_in("bench"):
        for node in walked(path):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            inside = node.module.replace(".", "/")
            places = [folder / f"{inside}.py" for folder in (path.parent, bench)]
            named = {n for place in places if place.exists() for n in names_of(place)}
            named |= {each.stem for each in (bench / inside).glob("*.py")}
            if named:
                lacking = [each.name for each in node.names if each.name not in named]
                found += [f"{path.relative_to(ROOT)}: {node.module}.{name}" for name in lacking]
    assert found == []


def sources_in(folder: str) -> list[Path]:
    """Source files of a folder, without environments that benches of peers use."""
    return [path for path in (ROOT / folder).rglob("*.py") if ".venvs" not in path.parts]


def from_source(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each `from` import of the source, except `shoal`, whose names are
    made at import."""
    for node in walked(path):
        if isinstance(node, ast.ImportFrom) and node.module in modules() and node.module != "shoal":
            yield from ((node.module, each.name) for each in node.names)


@cache
def names_of(path: Path) -> frozenset[str]:
    """Names assigned, defined or imported in a module."""
    names: set[str] = set()
    for node in walked(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
    return frozenset(names)
