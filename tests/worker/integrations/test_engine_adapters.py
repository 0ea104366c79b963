"""Adapters of engines, with stand-ins for the engines' packages: calls that must not stop a whole
engine."""

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.weights.subscription import Weights
from shoal.weights.version import WeightVersion
from shoal_proto.v1.weights_pb2 import VersionRecord

VLLM = {
    "vllm": "",
    "vllm.distributed": "",
    "vllm.distributed.parallel_state": "get_world_group",
    "vllm.distributed.weight_transfer": "WeightTransferEngineFactory WeightTransferTrainerFactory",
    "vllm.distributed.weight_transfer.base": "TrainerInitInfo TrainerWeightTransferEngine"
    " VLLMWeightSyncClient WeightSource WeightTransferEngine WeightTransferInitInfo"
    " WeightTransferUpdateInfo",
    "vllm.model_executor": "",
    "vllm.model_executor.model_loader": "get_model_loader",
    "vllm.model_executor.model_loader.reload": "layerwise",
}
VERL = {
    "verl": "",
    "verl.checkpoint_engine": "",
    "verl.checkpoint_engine.base": "CheckpointEngineRegistry CheckpointEngineWithCache",
}


class StandIn:
    """A class of an engine's package."""

    @staticmethod
    def register(name: str) -> Any:
        return lambda kind: kind


@pytest.fixture
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of `shoal.integrations`, imported with stand-ins for its engine."""
    name, packages = request.param
    for package, names in packages.items():
        module = ModuleType(package)
        for each in names.split():
            setattr(module, each, type(each, (StandIn,), {}))
        monkeypatch.setitem(sys.modules, package, module)
    full = f"shoal.integrations.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    yield importlib.import_module(full)
    sys.modules.pop(full, None)


@pytest.mark.parametrize("adapter", [("vllm", VLLM)], indirect=True, ids=["vllm"])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), MemoryError()])
def test_a_worker_that_cannot_stage_a_version_tells_the_others(
    adapter: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers wait for its vote, whatever the error is."""
    votes: list[bool] = []

    def vote(own: bool) -> bool:
        votes.append(own)
        return own

    def fetch(version: object) -> None:
        raise error

    monkeypatch.setattr(adapter, "all_true", vote)
    monkeypatch.setattr(adapter, "subscribe", lambda *_, **__: SimpleNamespace(fetch=fetch))
    engine = adapter.ShoalWeightTransferEngine()
    engine.init_transfer_engine(adapter.ShoalInitInfo(series="rl/policy"))
    with pytest.raises(type(error)):
        engine.receive_weights(adapter.ShoalUpdateInfo())
    assert votes == [False]


@pytest.mark.parametrize("adapter", [("vllm", VLLM)], indirect=True, ids=["vllm"])
def test_workers_install_one_version_if_each_sees_another_newest_one(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 58 is committed between the calls of two tensor-parallel workers."""
    barrier, votes, own_rank = threading.Barrier(2, timeout=10.0), [0, 0], threading.local()
    installed: list[tuple[int, int]] = []

    def lowest(own: int) -> int:
        votes[own_rank.rank] = own
        barrier.wait()
        found = min(votes)
        barrier.wait()
        return found

    class Subscription:
        def __init__(self, newest: int) -> None:
            self.newest = newest

        def fetch(self, version: int | str) -> Any:
            number = self.newest if version == "newest" else int(version)
            return Weights(WeightVersion(VersionRecord(number=number)), {"w": torch.ones(2)})

        def check_newer(self, version: object) -> None:
            pass

        def installed(self, weights: Any) -> None:
            installed.append((own_rank.rank, weights.version.number))

    def work(rank: int) -> None:
        own_rank.rank = rank
        engine = adapter.ShoalWeightTransferEngine()
        engine._subscription = Subscription(57 + rank)
        engine._serves = lambda: [("w", torch.zeros(2))]
        engine._load = lambda weights: None
        engine.receive_weights(SimpleNamespace(version=None))

    monkeypatch.setattr(adapter, "lowest", lowest)
    with ThreadPoolExecutor(2) as workers:
        list(workers.map(work, range(2)))
    assert sorted(installed) == [(0, 57), (1, 57)]


class Engine:
    """A vLLM engine's client. The first update fails, as if the engine had been restarted."""

    def __init__(self) -> None:
        self.is_leased = False
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, info: object) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, info: dict[str, int]) -> None:
        assert self.is_leased, "the version may be dropped"
        self.calls.append(f"update {info['version']}")
        if self.calls.count("init") == 1:
            raise OSError("500 Internal Server Error")

    def finish_weight_update(self, version: str) -> None:
        self.calls.append(f"finish {version}")


class Followed:
    """A subscription whose newest version is a further one of `newest` at each wait."""

    def __init__(self, engine: Engine, *newest: int) -> None:
        self._engine = engine
        self._newest = iter(newest)

    def wait(self, newer_than: int) -> WeightVersion:
        number = next(self._newest)
        assert number > newer_than
        return WeightVersion(VersionRecord(number=number))

    @contextmanager
    def leased(self, version: WeightVersion) -> Iterator[None]:
        self._engine.is_leased = True
        yield
        self._engine.is_leased = False


@pytest.mark.parametrize("adapter", [("vllm", VLLM)], indirect=True, ids=["vllm"])
@pytest.mark.parametrize("newest", [1, 2])
def test_an_engine_gets_the_newest_version_after_one_that_it_could_not_install(
    newest: int, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest version may be the one that it could not install."""
    engine = Engine()
    followed = Followed(engine, 1, newest)
    monkeypatch.setattr(adapter, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(adapter, "subscribe", lambda *_, **__: nullcontext(followed))
    finish = f"finish {newest}"
    adapter.follow(engine, "rl/policy", until=lambda version: finish in engine.calls)
    assert engine.calls == ["init", "update 1", "init", f"update {newest}", finish]


@pytest.mark.parametrize("adapter", [("vllm", VLLM)], indirect=True, ids=["vllm"])
def test_a_last_version_that_an_engine_cannot_install_is_an_error(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    monkeypatch.setattr(adapter, "subscribe", lambda *_, **__: nullcontext(Followed(engine, 1)))
    with pytest.raises(OSError, match="500 Internal Server Error"):
        adapter.follow(engine, "rl/policy", until=lambda version: True)


@pytest.mark.parametrize("adapter", [("verl", VERL)], indirect=True, ids=["verl"])
def test_an_actor_that_publishes_does_not_stop_its_event_loop(
    adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication waits for the previous one."""
    goes_on = threading.Event()

    def publish(*_: object, **__: object) -> Any:
        assert goes_on.wait(5.0), "the event loop stands still"
        return SimpleNamespace(wait=lambda level, timeout: 1)

    async def act() -> None:
        goes_on.set()

    async def both() -> list[Any]:
        engine = adapter.ShoalCheckpointEngine(is_master=True, series="rl/policy")
        return await asyncio.gather(engine.send_weights([("w", torch.ones(2))], 3), act())

    monkeypatch.setattr(adapter, "publish", publish)
    assert asyncio.run(both()) == [1, None]


class Series:
    """A subscription to versions of the given steps, with the numbers from 1."""

    def __init__(self, *steps: int) -> None:
        self.published = [SimpleNamespace(number=n, step=step) for n, step in enumerate(steps, 1)]
        self.has_new = asyncio.Event()

    def publish(self, step: int) -> None:
        self.published.append(SimpleNamespace(number=len(self.published) + 1, step=step))
        self.has_new.set()

    def versions(self) -> list[Any]:
        return self.published[-2:]

    def newest(self) -> Any:
        return self.published[-1] if self.published else None

    async def fetch_async(self, version: Any) -> dict[str, int]:
        return {"number": version.number}

    def installed(self, weights: object) -> None:
        pass

    async def wait_async(self, newer_than: int, timeout: float) -> Any:
        if len(self.published) <= newer_than:
            await self.has_new.wait()
        return self.newest()


@pytest.mark.parametrize("adapter", [("verl", VERL)], indirect=True, ids=["verl"])
@pytest.mark.parametrize("step", [10, 20, None])
def test_a_rollout_waits_for_the_weights_of_a_training_that_was_restarted(
    adapter: Any, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before has published the same step, or a later one. Its versions do not count."""
    series = Series(10, 20)
    monkeypatch.setattr(adapter, "subscribe", lambda *_, **__: series)

    async def received() -> Any:
        engine = adapter.ShoalCheckpointEngine(series="rl/policy")
        _, rollouts = engine.build_topology(2, 1, [{}, {}, {}])
        engine.init_process_group(**{name: values[0] for name, values in rollouts.items()})
        found = asyncio.create_task(taken(engine.receive_weights(step)))
        for _ in range(3):
            await asyncio.sleep(0)
        series.publish(step or 10)
        return await asyncio.wait_for(found, 5.0)

    async def taken(weights: AsyncIterator[tuple[str, int]]) -> dict[str, int]:
        return {name: value async for name, value in weights}

    assert asyncio.run(received()) == {"number": 3}
