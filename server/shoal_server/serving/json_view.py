"""Base of the data that the HTTP API shows."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field


@dataclass(frozen=True, kw_only=True)
class View:
    """Base of all views: the descriptions of fields are their docstrings, and NaN and infinity are
    sent as text.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    def __init_subclass__(cls, **options: Any) -> None:
        # Pydantic's `use_attribute_docstrings` parses the module again for each use of a class: the
        # first request would take half a second, in which the coordinator answers nobody.
        super().__init_subclass__(**options)
        descriptions = dict(_field_docstrings(cls.__module__).get(cls.__qualname__, ()))
        annotated: Any = Annotated
        for name, annotation in cls.__annotations__.items():
            if name in descriptions:
                described = annotated[annotation, Field(description=descriptions[name])]
                cls.__annotations__[name] = described


@cache
def _field_docstrings(module: str) -> dict[str, list[tuple[str, str]]]:
    """Return the docstrings of the fields of the module's classes, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}  # a module without its source: fields have no descriptions
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {each.name: list(_docstrings_in(each)) for each in classes}


def _docstrings_in(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, after in pairwise(node.body):
        match line, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, inspect.cleandoc(text)
