"""A server's part in a cut: images of all its shards, or of none."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import cast

import pytest
import pytest_asyncio
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import Fenced, SnapshotFailed, StalePush
from shoal_proto.status import to_detail
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import PushOutcome
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.shards.steps import StepId, from_bits, merged
from shoal_server.etcd import keys
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import DensePush, is_dense, new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.sessions import RememberedOutcome
from shoal_server.parameters.shard.step_scope import Scope
from shoal_server.parameters.snapshot.barriers import MAX_QUIET_JOBS, SnapshotBarriers

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


@pytest_asyncio.fixture
async def members() -> AsyncIterator["Members"]:
    store = MemoryStore()
    async with Fence(store) as fence:
        yield Members(store, fence)


class Members:
    """The members of a job, as their records in etcd say."""

    def __init__(self, store: MemoryStore, fence: Fence) -> None:
        self._store = store
        self.fence = fence

    async def admit(self, member_id: str) -> str:
        """Return the session of a new member."""
        record = json.dumps({"incarnation": member_id})
        await self._store.put(keys.member("job", member_id), record.encode())
        return await self._check(member_id, member_id)

    async def remove(self, member_id: str) -> None:
        await self._store.delete(keys.member("job", member_id))
        with pytest.raises(Fenced):
            await self._check(member_id, "another")

    async def _check(self, member_id: str, incarnation: str) -> str:
        """Have the fence look the member up, unless it knows that incarnation."""
        token = Token(job="job", member_id=member_id, incarnation=incarnation)
        return await self.fence.check(token)


class Server:
    """A server with shards, and the barrier for pushes to them."""

    def __init__(self, fence: Fence, *shard_ids: int) -> None:
        self.placement_id = "first"
        self._catalog = Catalog(MemoryStore(), Holder("ps", "one"))
        self._fence = fence
        self.barriers = SnapshotBarriers(self._catalog, fence, lambda job: self.placement_id)
        self._add(*shard_ids)

    def _add(self, *shard_ids: int) -> None:
        for each in map(new_replica, shard_ids):
            assert self._catalog.add(each)

    def start_over(self) -> None:
        """Replace the shards by new ones, of another run."""
        replicas = self._catalog.of_job("job")
        for each in replicas:
            self._catalog.remove(each)
        self._add(*(each.shard_id for each in replicas))
        self.placement_id = "second"

    def lead(self, *shard_ids: int, pushes: Mapping[StepId, Scope]) -> None:
        """Become primary of shards that remember these pushes."""
        for replica in map(new_replica, shard_ids):
            for step, scope in pushes.items():
                outcome = RememberedOutcome(1, 0)
                replica.state.sessions.remember(step.session, step.sequence, outcome, scope)
            assert self._catalog.add(replica)

    def apply(self, step: StepId, shard_id: int) -> None:
        replica = self._catalog.find("job", shard_id)
        assert replica is not None and is_dense(replica.state)
        push = DensePush(
            session=step.session,
            sequence=step.sequence,
            epoch=1,
            base_version=1,
            lr=None,
            blocks=(0,),
            gradient=struct.pack("4f", 1, 1, 1, 1),
        )
        replica.state.push(push, self._fence.is_live)

    async def push(self, step: StepId, shard_id: int) -> None:
        async with self.barriers.admit_part("job", step.session, step.sequence):
            self.apply(step, shard_id)


def new_replica(shard_id: int) -> ShardReplica:
    blocks = [Block(parameter="w", num_elements=4)]
    spec = Shard(shard_id=shard_id, epoch=1, dtype="float32", blocks=blocks)
    return ShardReplica("job", new_dense_shard(spec, SGD, bytearray(16)), ReplicaRole.PRIMARY, 1)


async def test_a_failed_cut_leaves_no_image_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes would continue to copy old values for an open image."""
    catalog = Catalog(MemoryStore(), Holder("ps-0", "one"))
    whole, failing = new_replica(1), new_replica(2)
    for each in (whole, failing):
        assert catalog.add(each)

    def image() -> ShardImage:
        assert whole.state.body.images, "the image of the other shard is made"
        raise MemoryError

    monkeypatch.setattr(failing, "image", image)
    barriers = SnapshotBarriers(catalog, cast(Fence, None))
    begun = await barriers.close("job", "cut", limit_s=60.0)
    with pytest.raises(MemoryError):
        await barriers.freeze("job", "cut", begun, wait_s=1.0, take_torn=False)
    assert not whole.state.body.images


async def test_the_first_cut_of_a_run_has_a_push_in_progress_completely_or_not_at_all(
    members: Members,
) -> None:
    """A server admits its part of the push before the cut, and applies it later. The other server
    gets its part during the cut."""
    old, new = [StepId(await members.admit(name), 1) for name in ("old", "new")]
    first, second = Server(members.fence, 1), Server(members.fence, 2)
    for server, shard_id in ((first, 1), (second, 2)):
        await server.push(old, shard_id)
        server.start_over()
    async with AsyncExitStack() as stack:
        admitted = first.barriers.admit_part("job", new.session, new.sequence)
        await stack.enter_async_context(admitted)
        begun = merged([await each.barriers.close("job", "cut", 60.0) for each in (first, second)])
        late = asyncio.create_task(second.push(new, 2))
        first.apply(new, 1)
    cuts = [
        await each.barriers.freeze("job", "cut", begun, wait_s=10.0, take_torn=False)
        for each in (first, second)
    ]
    await late
    assert [stamp.version for stamps, _ in cuts for stamp in stamps] == [2, 2]
    assert begun == {new: None}
    for each in (first, second):
        each.barriers.abort("job", "cut", "the test ends")


async def test_a_step_of_which_a_shard_refused_its_part_is_named(members: Members) -> None:
    """The member is live, and has not pushed the part again yet. The cut does not wait for it."""
    step = StepId(await members.admit("live"), 1)
    server = Server(members.fence, 1, 2)
    refusal = to_detail(StalePush("the gradient is too stale"))
    async with server.barriers.admit_part("job", step.session, step.sequence) as passage:
        server.apply(step, 1)
        outcomes = [PushOutcome(shard_id=1, version=2), PushOutcome(shard_id=2, error=refusal)]
        passage.record_answers(outcomes)
    begun = await server.barriers.close("job", "cut", 60.0)
    stamps, torn = await server.barriers.freeze("job", "cut", begun, wait_s=60.0, take_torn=False)
    assert [stamp.version for stamp in stamps] == [2, 1]
    assert torn == [step]
    server.barriers.abort("job", "cut", "the test ends")


async def test_a_step_that_a_dead_member_left_half_applied_is_named_with_any_number_of_jobs(
    members: Members,
) -> None:
    left, other = [StepId(await members.admit(name), 1) for name in ("dead", "live")]
    server = Server(members.fence, 1, 2)
    await server.push(left, 1)
    for shard_id in (1, 2):
        await server.push(other, shard_id)
    await server.barriers.close("job", "first", 60.0)
    server.barriers.open("job", "first")
    await members.remove("dead")
    for number in range(MAX_QUIET_JOBS + 1):
        await server.barriers.close(f"job-{number}", "cut", 60.0)
    begun = await server.barriers.close("job", "second", 60.0)
    _, torn = await server.barriers.freeze("job", "second", begun, wait_s=1.0, take_torn=True)
    assert torn == [left]
    server.barriers.abort("job", "second", "the test ends")


@pytest.mark.parametrize("num_scopes", [1, 256], ids=["one-scope", "a-scope-for-each-step"])
async def test_a_first_cut_decodes_a_scope_once_however_many_pushes_have_it(
    members: Members, num_scopes: int
) -> None:
    """Else the server would not answer for many seconds, and lose its shards."""
    ids = frozenset(range(500))
    steps = [StepId(f"member-{number % 32}", 1 + number // 32) for number in range(256)]
    touched = {step: ids - {n % num_scopes} for n, step in enumerate(steps)}
    server = Server(members.fence)
    server.lead(*range(20), pushes={step: scope_of(*touched[step]) for step in steps})
    from_bits.cache_clear()
    assert await server.barriers.close("job", "cut", 60.0) == touched
    assert from_bits.cache_info().misses == num_scopes
    server.barriers.abort("job", "cut", "the test ends")


async def test_a_server_works_on_while_a_cut_reads_the_steps_of_its_shards(
    members: Members,
) -> None:
    """The cut has the steps of a shard that arrives meanwhile."""
    first, second = StepId("a", 1), StepId("b", 1)
    server = Server(members.fence)
    server.lead(1, 2, pushes={first: scope_of(1, 2)})
    closing = asyncio.create_task(server.barriers.close("job", "cut", 60.0))
    await asyncio.sleep(0)
    assert not closing.done()
    server.lead(3, pushes={second: scope_of(3)})
    assert await closing == {first: {1, 2}, second: {3}}
    server.barriers.abort("job", "cut", "the test ends")


async def test_a_cut_continues_where_a_cancelled_one_has_ended(members: Members) -> None:
    """The deadline of the call may end before all shards are read, at each attempt."""
    steps = {number: StepId("a", number) for number in range(1, 6)}
    server = Server(members.fence)
    for number, step in steps.items():
        server.lead(number, pushes={step: scope_of(number)})
    closing = asyncio.create_task(server.barriers.close("job", "first", 60.0))
    for _ in range(3):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    from_bits.cache_clear()
    begun = await server.barriers.close("job", "second", 60.0)
    assert begun == {step: {number} for number, step in steps.items()}
    assert from_bits.cache_info().misses == 2
    server.barriers.abort("job", "second", "the test ends")


async def test_shards_that_change_during_a_cut_end_it_if_another_cut_is_asked_for(
    members: Members,
) -> None:
    """The other cut is refused, and learns the steps of the shard that has arrived."""
    server = Server(members.fence, 1)
    begun = await server.barriers.close("job", "first", 60.0)
    server.lead(2, pushes={StepId("a", 1): scope_of(2)})
    with pytest.raises(SnapshotFailed, match="another snapshot is being taken"):
        await server.barriers.close("job", "second", 60.0)
    with pytest.raises(SnapshotFailed, match="changed during the cut"):
        await server.barriers.freeze("job", "first", begun, wait_s=1.0, take_torn=False)


def scope_of(*shard_ids: int) -> Scope:
    scope = Scope.of(shard_ids)
    assert scope is not None
    return scope
