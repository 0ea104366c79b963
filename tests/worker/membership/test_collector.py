"""Objects from before the first generation are excluded from Python's later garbage collections."""

import gc
from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.session.distribution import LongLivedObjects


class Loop:
    """An object that refers to itself."""

    num_left = 0

    def __init__(self) -> None:
        self.own = self
        type(self).num_left += 1

    def __del__(self) -> None:
        type(self).num_left -= 1


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    Loop.num_left = 0
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_the_collector_examines_only_objects_made_after_the_freeze() -> None:
    objects = LongLivedObjects()
    before = Loop()
    objects.freeze()
    assert gc.get_freeze_count() > 10_000
    assert not any(each is before for each in gc.get_objects())
    del before
    Loop()
    gc.collect()
    assert Loop.num_left == 1, "only the later one is collected"
    objects.release()
    gc.collect()
    assert Loop.num_left == 0


def test_garbage_from_before_the_freeze_is_collected() -> None:
    Loop()
    objects = LongLivedObjects()
    objects.freeze()
    assert Loop.num_left == 0
    objects.release()


def test_objects_that_the_script_has_frozen_stay_frozen() -> None:
    gc.freeze()
    objects = LongLivedObjects()
    objects.freeze()
    objects.release()
    assert gc.get_freeze_count()


def test_a_collector_that_is_off_is_left_alone() -> None:
    gc.disable()
    try:
        LongLivedObjects().freeze()
    finally:
        gc.enable()
    assert not gc.get_freeze_count()


def test_a_session_freezes_objects_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    model = torch.nn.Linear(2, 1)
    with shoal.join("alone") as session:
        session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
