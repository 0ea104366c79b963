"""Digests of Hugging Face's data sets, taken from their Arrow table: equal on all members."""

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch.utils.data import Dataset, Subset

from shoal.data.content import content_of

SIZE = 400


class Scalar:
    """Imitation of one of pyarrow's scalars."""

    def __init__(self, value: object) -> None:
        self.is_valid, self._value = value is not None, value

    def as_py(self) -> object:
        return self._value


class Text(Scalar):
    type = "string"

    def as_buffer(self) -> Any:
        content = str(self._value).encode()
        end = SimpleNamespace(to_pybytes=lambda: content)
        return SimpleNamespace(size=len(content), slice=lambda start: end)


class Numbers(list[Scalar]):
    def slice(self, start: int, count: int) -> "Numbers":
        return Numbers(self[start : start + count])


class Row(Scalar):
    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(numbers)
        self.values = Numbers(map(Scalar, numbers))


class Column(list[Any]):
    def to_pylist(self) -> list[object]:
        return [each.as_py() for each in self]


def scalar(value: Any) -> Scalar:
    return (
        Text(value)
        if isinstance(value, str)
        else (Row if isinstance(value, list) else Scalar)(value)
    )


class Table:
    """Imitation of one of the library's tables."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.num_rows = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self.num_rows

    def column(self, index: int) -> Column:
        return self.columns[index]

    @property
    def columns(self) -> list[Column]:
        return [Column(map(scalar, each)) for each in self._columns.values()]

    def fast_gather(self, rows: Sequence[int]) -> "Table":
        return Table({name: [own[row] for row in rows] for name, own in self._columns.items()})


class StandIn:
    """Imitation of the library's Dataset: a table, and the indices of the rows that are samples."""

    def __init__(self, data: Table, indices: Table | None = None) -> None:
        self.data, self._indices = data, indices
        self._fingerprint = str(id(self))

    @classmethod
    def from_dict(cls, columns: dict[str, list[Any]]) -> Self:
        return cls(Table(columns))

    def shuffle(self, seed: int) -> Self:
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return type(self)(self.data, Table({"indices": order.tolist()}))

    def __len__(self) -> int:
        return len(self._indices or self.data)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a digest is to ask for no sample")


class Own(Dataset[Any]):
    """A dataset class of the script's own that wraps another dataset."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a digest is to ask for no sample")


@pytest.fixture(params=["stand-in", "library"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library's Dataset if it is installed, and an imitation of it."""
    if request.param == "library":
        pytest.importorskip("datasets")
        return importlib.import_module("datasets").Dataset
    module = ModuleType("datasets")
    vars(module)["Dataset"] = StandIn
    monkeypatch.setitem(sys.modules, "datasets", module)
    return StandIn


def columns(first: int = 0, root: str = "data") -> dict[str, list[Any]]:
    numbers = range(first, first + SIZE)
    return {
        "label": [number % 10 for number in numbers],
        "path": [f"/{root}/{number}.png" for number in numbers],
        "score": [None if number % 3 else number / 7 for number in numbers],
        "tokens": [[number] * 9 for number in numbers],
    }


KINDS: dict[str, Callable[[Any, int], Any]] = {
    "other rows": lambda of, seed: of.from_dict(columns(seed)),
    "labels alone": lambda of, seed: of.from_dict({"label": columns(seed)["label"]}),
    "tokens alone": lambda of, seed: of.from_dict({"tokens": columns(seed)["tokens"]}),
    "texts alone": lambda of, seed: of.from_dict({"path": columns(seed)["path"]}),
    "another order": lambda of, seed: of.from_dict(columns()).shuffle(seed=seed),
    "a split of it": lambda of, seed: Subset(of.from_dict(columns(seed)), range(9)),
    "within a class": lambda of, seed: Own(of.from_dict(columns()).shuffle(seed=seed)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_have_another_digest_and_the_same_ones_the_same(library: Any, kind: str) -> None:
    make = KINDS[kind]
    digests = [content_of(make(library, seed)) for seed in (1, 1, 2, 3)]
    assert digests[0] == digests[1] != ""
    assert len(set(digests)) == 3, digests


def test_the_folder_of_the_files_does_not_change_the_digest(library: Any) -> None:
    here, there = (library.from_dict(columns(root=root)) for root in ("mnt/a", "scratch"))
    assert content_of(here) == content_of(there)


def test_a_data_set_without_rows_has_a_digest(library: Any) -> None:
    assert content_of(library.from_dict({"label": []})) != content_of(library.from_dict(columns()))
