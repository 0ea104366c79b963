"""The digest by which members check that their data sets hold the same samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training import rank_bodies
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

import shoal
from shoal.data import content
from shoal.data.content import content_fields, content_of
from shoal.data.order import CONTENT_FIELD
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import ProposalConflict

SIZE = 1000


def columns() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SIZE, 6, 4, generator=generator)
    return inputs, torch.randint(0, 10, (SIZE,), generator=generator)


def drawn(seed: int) -> list[int]:
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))[:800].tolist()


class Own(Dataset[Any]):
    """A dataset class as scripts write it. A digest must not call its `__getitem__`."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets
        self.root = object()
        self._cache = torch.rand(len(inputs))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a digest is to ask for no sample")


class Wrapped(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a digest is to ask for no sample")


def split(seed: int) -> Subset[Any]:
    data = TensorDataset(*columns())
    return random_split(data, [800, 200], torch.Generator().manual_seed(seed))[0]


def _rows(seed: int) -> tuple[Tensor, ...]:
    return tuple(column[drawn(seed)] for column in columns())


def _samples(seed: int) -> list[dict[str, Any]]:
    inputs, targets = _rows(seed)
    return [
        {"x": x, "more": [int(y), {"text": f"of {y}", "none": None}]}
        for x, y in zip(inputs, targets, strict=True)
    ]


KINDS: dict[str, Callable[[int], Any]] = {
    "tensors": _rows,
    "floats alone": lambda seed: _rows(seed)[:1],
    "integers alone": lambda seed: _rows(seed)[1:],
    "TensorDataset": lambda seed: TensorDataset(*_rows(seed)),
    "random_split": split,
    "a split of a split": lambda seed: Subset(split(seed), range(0, 800, 2)),
    "a split of what is not known": lambda seed: Subset(Own([0] * SIZE, 0), drawn(seed)),
    "indices in a tensor": lambda seed: Subset(Own([0] * SIZE, 0), torch.tensor(drawn(seed))),  # type: ignore[arg-type]
    "many indices": lambda seed: Subset(TensorDataset(*columns()), drawn(seed) * 100),
    "ConcatDataset": lambda seed: ConcatDataset([TensorDataset(*columns()), split(seed)]),
    "StackDataset": lambda seed: StackDataset(a=TensorDataset(*_rows(0)), b=split(seed)),
    "NumPy": lambda seed: _rows(seed)[0].numpy(),
    "samples in a list": _samples,
    "texts": lambda seed: [f"sentence {index}" for index in drawn(seed)],
    "bfloat16": lambda seed: (_rows(seed)[0].bfloat16(),),
    "complex": lambda seed: (torch.view_as_complex(_rows(seed)[0].view(800, 6, 2, 2)),),
    "booleans": lambda seed: (_rows(seed)[1] > 4,),
    "a class of the script's own": lambda seed: Own(*_rows(seed)),
    "one of NumPy's arrays": lambda seed: Own(*(column.numpy() for column in _rows(seed))),
    "one of lists": lambda seed: Own([f"/a/{i}.png" for i in drawn(seed)], _rows(seed)[1].tolist()),
    "a split within another": lambda seed: Wrapped(Wrapped(split(seed))),
}


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", KINDS)
def test_other_samples_have_another_digest_and_the_same_ones_the_same(kind: str) -> None:
    """Datasets that members make with the same seed have equal digests; other seeds give other
    digests."""
    make = KINDS[kind]
    digests = [content_of(make(seed)) for seed in (1, 1, 2, 3)]
    assert digests[0] == digests[1] != ""
    assert len(set(digests)) == 3, digests
    assert content_fields(DataLoader(make(1), 4))[0] == {CONTENT_FIELD: digests[0]}


def test_two_swapped_indices_of_a_split_change_its_digest() -> None:
    """The digest covers all indices, not a sample of them."""
    indices = drawn(1)
    others = [*indices]
    others[401], others[402] = others[402], others[401]
    base = TensorDataset(*columns())
    assert content_of(Subset(base, indices)) != content_of(Subset(base, others))


def test_the_digest_depends_on_values_and_not_on_their_layout_in_memory() -> None:
    inputs, targets = columns()
    expected = content_of((inputs, targets))
    transposed = inputs.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert transposed.stride() != inputs.stride()
    padded = torch.zeros(SIZE, 12, 8)
    padded[:, ::2, ::2] = inputs
    for same in (transposed, padded[:, ::2, ::2], inputs.double(), inputs.requires_grad_()):
        assert content_of((same, targets)) == expected
    assert content_of(TensorDataset(inputs, targets)) == expected


def test_last_bits_that_hosts_round_differently_do_not_change_the_digest() -> None:
    """A column normalised on another processor differs in its last bits, and is the same data."""
    inputs, targets = columns()
    inputs[::3] = 0.0
    noise = 1 + 2e-7 * (torch.rand(inputs.shape) - 0.5)
    rounded = inputs * noise + 1e-9 * torch.randn(inputs.shape)
    assert not torch.equal(rounded, inputs)
    assert content_of((rounded, targets)) == content_of((inputs, targets))


def test_non_finite_values_count_in_the_digest() -> None:
    inputs = torch.randn(70, 3)
    inputs[1, :], inputs[2, :], inputs[3, :] = float("nan"), float("inf"), -float("inf")
    other = inputs.clone()
    assert content_of((inputs,)) == content_of((other,))
    other[3, :] = float("inf")
    assert content_of((inputs,)) != content_of((other,))


def test_data_that_cannot_be_read_has_an_empty_digest() -> None:
    """The digest reads no samples, no sparse tensors and none on the meta device."""
    for unknown in (
        Own([0] * 4, 0)._cache.to("meta")[:, None],
        torch.eye(4).to_sparse(),
    ):
        assert content_of((unknown,)) == ""
    nothing: Any = Wrapped(range(2))  # type: ignore[arg-type]
    nothing._drawn, nothing.shorter = [1, 2], [1]
    assert content_of(nothing) == ""
    assert content_fields(nothing) == ({}, {})
    shards = shoal.Shards([[1, 2], [3]], lengths=[2, 1])
    assert content_of(shards) == ""


def test_a_paths_file_name_counts_in_the_digest_and_its_folder_does_not() -> None:
    """A path is a string, or an object of pathlib. torchvision has both, also in attributes that
    begin with _."""
    names = [f"{index}.png" for index in drawn(1)]
    for kind in (str, Path):
        here, there, other = (
            Own([kind(f"{root}/{name}") for name in own], 0)
            for root, own in (("/a", names), ("/mnt/b", names), ("/a", names[::-1]))
        )
        assert content_of(here) == content_of(there) != content_of(other) != ""
        assert content_of(vars(here)["inputs"]) != content_of(vars(other)["inputs"])


def test_private_attributes_of_torchvisions_datasets_count_in_the_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(names: list[str]) -> Any:
        data = Wrapped(range(len(names)))  # type: ignore[arg-type]
        data._image_files = [Path("/a", name) for name in names]  # type: ignore[attr-defined]
        return data

    members = [made(names) for names in (["a", "b"], ["a", "b"], ["b", "a"])]
    assert [content_of(member) for member in members] == ["", "", ""]
    monkeypatch.setattr(Wrapped, "__module__", "torchvision.datasets.food101")
    digests = [content_of(member) for member in members]
    assert digests[0] == digests[1] != digests[2] != ""


def test_a_cache_that_fills_up_does_not_change_the_digest() -> None:
    """Members fill their own caches with the samples of their shares."""
    members = [Own(*columns()) for _ in range(2)]
    for place, member in enumerate(members):
        setattr(member, "cache", [None] * SIZE)  # noqa: B010 - of no class that is known
        vars(member)["cache"][place] = member.inputs[place]
    assert content_of(members[0]) == content_of(members[1]) == content_of(Own(*columns()))


def test_the_digest_reads_only_a_few_rows_of_a_mapped_file(tmp_path: Path) -> None:
    """A page of a sparse file takes memory from its first read on."""
    shape = (1 << 16, 1 << 10)
    lazily = np.memmap(tmp_path / "rows", dtype=np.uint8, mode="w+", shape=shape)
    lazily[0], lazily[-1] = 1, 2
    before = _resident_bytes()
    assert content_of(Own(lazily, [0] * len(lazily))) != ""
    assert content_of((torch.from_numpy(lazily),)) != ""
    assert _resident_bytes() - before < lazily.nbytes // 4


def _resident_bytes() -> int:
    kibibytes = Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0]
    return int(kibibytes) * 1024


def test_the_number_of_values_that_a_digest_reads_is_bounded() -> None:
    """The number of values read does not grow with the data set, nor with what a sample holds."""
    deep: Any = [1.0] * 64
    for _ in range(6):
        deep = [deep] * 64
    assert content_of([deep] * 64) == content_of([deep] * 64)
    looked_at = len(list(content._dataset_items(columns(), SIZE, 0)))
    large = (torch.zeros(1).expand(1 << 20, 100), torch.zeros(1 << 20))
    assert len(list(content._dataset_items(large, 1 << 20, 0))) == looked_at


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "async-sgd"])
def test_a_member_with_another_split_is_refused_and_the_others_train_on(
    cluster: LocalCluster, strategy: str
) -> None:
    """The member would train, without an error, on samples in the others' validation part."""
    data = TensorDataset(*rank_bodies.data())
    parts = [
        random_split(data, [40, len(data) - 40], torch.Generator().manual_seed(seed))[0]
        for seed in (1, 2)
    ]
    model, optimizer = rank_bodies.model_and_optimizer()
    with shoal.join(f"own-split-{strategy}", coordinator=cluster.coordinator) as session:
        replica, optimizer = session.distribute(model, optimizer, strategy=strategy)
        batch = next(session.batches(parts[0], global_batch_size=20))
        with (
            pytest.raises(ProposalConflict, match=r"dataset_content: .* but ") as refused,
            shoal.join(f"own-split-{strategy}", coordinator=cluster.coordinator) as stranger,
        ):
            stranger.distribute(*rank_bodies.model_and_optimizer(), strategy=strategy)
            next(stranger.batches(parts[1], global_batch_size=20))
        assert "The data sets differ" in str(refused.value)
        assert "manual_seed" in str(refused.value)
        with session.step() as step:
            session.backward(rank_bodies.loss_of(replica(batch.inputs), batch.targets))
        assert step.committed
