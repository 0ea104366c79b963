"""The parameter-server half of the source, as the contracts in pyproject.toml name it.

    python tests/structure/parameter_half.py

prints which modules outside import it, and what it imports outside itself. Needs `grimp`, which
comes with import-linter.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def half() -> tuple[str, ...]:
    """Packages and modules of the half."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each["type"] == "protected")
    return tuple(contract["protected_modules"])


def of_half(modules: Iterable[str]) -> list[str]:
    """The modules among these that belong to the half, by name."""
    names = half()
    return sorted(
        module
        for module in modules
        if any(module == name or module.startswith(f"{name}.") for name in names)
    )


def main() -> None:
    import grimp  # noqa: PLC0415

    parts = ("shoal_proto", "shoal_difference", "shoal_client", "shoal", "shoal_server")
    graph = grimp.build_graph(*parts)
    inside = set(of_half(graph.modules))
    into, out = [], Counter[str]()
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            if imported in inside and module not in inside:
                into.append(f"{module} -> {imported}")
            if module in inside and imported not in inside:
                out[imported] += 1
    print(f"{len(inside)} modules; {len(into)} imports of them from outside", *into, sep="\n  ")
    print(f"{sum(out.values())} imports of {len(out)} modules outside:")
    for name, number in sorted(out.items()):
        print(f"  {number:4d} {name}")


if __name__ == "__main__":
    main()
