"""Snapshots under load contain each push as a whole, and can be restored on other servers."""

import asyncio
import json
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clusters import snapshot_cluster
from support.clusters.parameter_servers import ParameterServers
from support.clusters.snapshot_cluster import ADAM, SCHEMA, Pusher, Snapshots, elements
from support.processes.served_process import awaited

from shoal_client.connection.coordinators import Coordinators
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.table_rows import Gradients
from shoal_client.parameters.tables import TableClient
from shoal_client.progress.samples import SampleClient
from shoal_proto.errors import (
    AccessDenied,
    InvalidSpec,
    JobFinished,
    JobInUse,
    NoServers,
    NothingLost,
    ProposalConflict,
    ShoalError,
    SnapshotDamaged,
    SnapshotFailed,
    StateLost,
    Unavailable,
)
from shoal_proto.incarnation import public_id
from shoal_proto.row_hash import shard_of
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import Piece, PushHeader, PushItem, PushRequest
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.replication_pb2 import SessionImage
from shoal_proto.v1.snapshots_pb2_grpc import ShardSnapshotsStub
from shoal_proto.v1.tables_pb2 import Initialiser, RowOptimizer, TableSpec
from shoal_server.coordinator.assembly import Coordinator
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.plug_in.options import ParameterOptions, SnapshotPolicy
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.snapshots.loading import SnapshotLoader
from shoal_server.coordinator.snapshots.taking import JobPosition, SnapshotTaker
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.limits import Limits
from shoal_server.core.processes import Holder
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.shards.assignments import JobAssignments, ShardContent
from shoal_server.etcd import keys
from shoal_server.etcd.api import Keyspace
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.records import restored_from, shard_map, snapshot_roots
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.shard import image_file
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest

TABLE = TableSpec(
    name="users",
    dim=2,
    dtype="float32",
    seed=3,
    initialiser=Initialiser(kind="constant", center=1.0),
    optimizer=RowOptimizer(kind="sgd", lr=0.5),
    num_shards=4,
)


def start(
    opened: ExitStack, directory: Path, num_servers: int = 2
) -> tuple[ParameterServers, Snapshots]:
    return snapshot_cluster.start(opened, directory / "snapshots", num_servers)


def pusher(opened: ExitStack, servers: ParameterServers, name: str, weight: float = 1.0) -> Pusher:
    made = Pusher(servers, name, weight=weight)
    opened.callback(made.close)
    return made


def images(library: SnapshotLibrary, manifest: Manifest) -> list[LoadedImage]:
    return [
        image_file.from_bytes(
            library.read_part(part), sha256=part.sha256, file=part.file, shard_id=part.shard_id
        )
        for part in manifest.parts
    ]


def newest_of(sessions: list[SessionImage]) -> dict[str, int]:
    return {each.session: max(each.sequences) for each in sessions}


@pytest.mark.long
def test_a_snapshot_under_load_has_whole_pushes(opened: ExitStack, tmp_path: Path) -> None:
    """Members subtract different powers of 1,000: the values show the pushes of each member."""
    servers, snapshots = start(opened, tmp_path)
    members = [pusher(opened, servers, f"m{i}", weight=1000.0**i).start() for i in range(3)]
    for _ in range(4):
        for member in members:
            member.wait_for_more(5)
        check_whole(snapshots.library, snapshots.take().manifest, members)
    for member in members:
        member.wait_for_more(5)
        member.stop()


@pytest.mark.long
def test_pushes_are_whole_while_servers_change(opened: ExitStack, tmp_path: Path) -> None:
    """A snapshot may fail meanwhile, but one that is listed is whole."""
    servers, snapshots = start(opened, tmp_path, num_servers=3)
    members = [pusher(opened, servers, f"m{i}", weight=1000.0**i).start() for i in range(3)]
    for change in (lambda: servers.stop("ps-1"), lambda: servers.add("ps-3"), lambda: None):
        changing = threading.Thread(target=change)
        changing.start()
        with suppress(SnapshotFailed, Unavailable):
            snapshots.take()
        changing.join()
        for member in members:
            member.wait_for_more(5)
        with suppress(SnapshotFailed, Unavailable):
            snapshots.take()
    for member in members:
        member.stop()
    manifests = snapshots.library.list()
    assert manifests
    for manifest in manifests:
        check_whole(snapshots.library, manifest, members)


def check_whole(library: SnapshotLibrary, manifest: Manifest, members: Sequence[Pusher]) -> None:
    """Check that all shards have the same pushes, by their values and by their sessions."""
    assert manifest.partial_steps == []
    taken = images(library, manifest)
    assert len(taken) == 6
    (value,) = {float(v) for each in taken for v in each.tensors["values"].unique()}
    counts = {m.session: int(-value // 1000**i % 1000) for i, m in enumerate(members)}
    for each in taken:
        assert newest_of(list(each.sessions)) == counts
    assert dict(manifest.steps) == counts


def test_an_unchanged_job_is_not_written_again(opened: ExitStack, tmp_path: Path) -> None:
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    first = snapshots.take().manifest
    assert first.num_new_bytes == first.num_bytes > 0
    second = snapshots.take().manifest
    assert (second.number, second.num_new_bytes) == (2, 0)
    assert snapshots.take(only_if_changed=True).manifest == second
    member.push()
    third = snapshots.take().manifest
    assert third.num_new_bytes == third.num_bytes
    assert not {part.file for part in third.parts} & {part.file for part in first.parts}


def test_a_snapshot_does_not_get_the_number_of_a_damaged_one(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m")
    snapshots.take()
    damaged = snapshots.take().manifest
    path = f"job/manifests/{damaged.number:09d}-{damaged.cut_id}.json"
    snapshots.library.storage.write(path, b"{")
    assert snapshots.take().manifest.number == 3


@pytest.mark.long
def test_a_job_restored_on_more_servers_continues_bit_for_bit(
    opened: ExitStack, tmp_path: Path
) -> None:
    """Three servers continue from the state of two, exactly as the two do."""
    servers, snapshots = start(opened, tmp_path)
    before = Pusher(servers, "m", weight=0.25, optimizer=ADAM)
    opened.callback(before.close)
    for _ in range(5):
        before.push()
    snapshots.cursor = SampleLedger(dataset_size=10, num_epochs=1).to_json()
    taken = snapshots.take().manifest
    others, other_snapshots = start(opened, tmp_path, num_servers=3)
    found = other_snapshots.restore()
    restored, led_by = found.manifest, found.servers
    assert restored == taken and list(led_by) == ["ps-0", "ps-1", "ps-2"]
    ledger = others.run(others.store.get(keys.sample_ledger("job")))
    assert ledger is not None and json.loads(ledger.value) == snapshots.cursor
    after = Pusher(others, "m", weight=0.25, optimizer=ADAM)
    opened.callback(after.close)
    assert after.values == before.values
    # The member has the same incarnation: its first five pushes are known.
    repeated = after.client.push(before.gradient)
    assert repeated.duplicates == 6
    for _ in range(4):
        after.push()
    for _ in range(3):
        before.push()
        after.push()
    assert after.values == before.values and len(elements(after.values)) > 0


@pytest.mark.long
def test_a_restore_is_refused_with_members_and_replaces_values_without(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    member.push()
    snapshots.take()
    member.push()
    with pytest.raises(JobInUse, match="saw m"):
        snapshots.restore()
    servers.expel("m")
    snapshots.restore()
    back = pusher(opened, servers, "n")
    assert elements(back.values) == {-1.0}
    back.push()
    assert elements(back.values) == {-2.0}
    # Snapshots from before the restore are of a state that the job cannot reach again.
    assert snapshots.take().manifest.lineage != snapshots.library.find(1).lineage


@pytest.mark.long
def test_a_restore_into_a_finished_job_is_refused(opened: ExitStack, tmp_path: Path) -> None:
    """A finished job would drop the restored state at once."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.take()
    servers.expel("m")
    spec = JobSpec(job="job")
    over = StateRecord(spec=spec, last_generation=Generation(1), finished=True, reason="done")
    servers.run(servers.store.put(keys.job_state("job"), state_to_json(over)))
    with pytest.raises(JobFinished, match="shoal rm job"):
        snapshots.restore()
    servers.run(servers.store.delete(keys.job_state("job")))
    snapshots.restore()


def test_a_snapshot_of_an_unknown_job_fails_and_leaves_no_record(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers = opened.enter_context(ParameterServers(1))
    snapshots = opened.enter_context(closing(Snapshots(servers, tmp_path)))
    with pytest.raises(SnapshotFailed, match="has no shards"):
        snapshots.take()
    assert servers.run(servers.store.keys(keys.JOBS)) == ()


def test_a_snapshot_that_fails_is_not_listed_and_pauses_no_push(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    member = pusher(opened, servers, "m").start()
    snapshots.library.storage.write("job/parts", b"a file where the folder should be")
    with pytest.raises(ShoalError, match="cannot be written"):
        snapshots.take()
    member.wait_for_more(5)
    member.stop()
    assert snapshots.library.list() == []
    servers.stop("ps-0")
    with pytest.raises(SnapshotFailed, match="is not registered"):
        snapshots.take()
    assert snapshots.library.list() == []


def test_another_cut_is_tried_if_a_primary_is_not_registered(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m")
    read, num_read = shard_map.servers, 0

    async def missing_at_first(store: Keyspace) -> dict[Holder, str]:
        nonlocal num_read
        num_read += 1
        return {} if num_read == 1 else await read(store)

    monkeypatch.setattr(shard_map, "servers", missing_at_first)
    assert snapshots.take().manifest.number == 1


@pytest.mark.long
def test_a_push_that_a_lost_member_made_in_part_is_reported(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    push_to_one_shard(opened, servers, member, servers.admit("dead"))
    servers.expel("dead")
    member.push()
    manifest = snapshots.take().manifest
    (partial, *others) = manifest.partial_steps
    assert f"push 1 of /shoal/v1/members/job/dead#{public_id('one')} lacks parts at" in partial
    assert len(others) <= 1
    taken = images(snapshots.library, manifest)
    assert [each.version for each in taken] == [3, 2, 2, 2, 2, 2]


def push_to_one_shard(
    opened: ExitStack, servers: ParameterServers, member: Pusher, token: Token
) -> None:
    """Push to shard 0 alone, as a member that is lost before it pushes to the other shards."""
    shard = member.client.fetch_map().shards[0]
    channel = opened.enter_context(grpc.insecure_channel(shard.address))
    item = PushItem(shard_id=shard.shard_id, epoch=shard.epoch, base_version=1)
    data = bytes(8 * sum(block.num_elements for block in shard.blocks))
    piece = Piece(shard_id=shard.shard_id, data=data, checksum=zlib.crc32(data))
    requests = [
        PushRequest(header=PushHeader(token=token, sequence=1, shards=[item])),
        PushRequest(piece=piece),
    ]
    (reply,) = ParametersStub(channel).Push(iter(requests), timeout=20.0)
    assert [outcome.version for outcome in reply.outcomes] == [2]


def test_rows_of_tables_are_restored(opened: ExitStack, tmp_path: Path) -> None:
    """Shards without a push are in the snapshot as well."""
    servers, snapshots = start(opened, tmp_path)
    token = servers.admit("m")
    gradients = array("f", [1.0] * 6)
    client = table_client(opened, servers, token)
    where = ("users", 0)
    ids = array("q", [i for i in range(200) if shard_of(i, TABLE.num_shards) == 0][:3])
    found = client.look_up({where: ids.tobytes()})[where]
    client.push(
        {
            where: Gradients(
                ids=ids.tobytes(),
                births=found.births,
                gradients=gradients.tobytes(),
                base_version=found.version,
                base_epoch=found.epoch,
            )
        }
    )
    manifest = snapshots.take().manifest
    assert [part.kind for part in manifest.parts] == ["table"] * TABLE.num_shards
    assert list(manifest.steps.values()) == [1] and manifest.partial_steps == []
    others, other_snapshots = start(opened, tmp_path, num_servers=3)
    other_snapshots.restore()
    back = table_client(opened, others, others.admit("n"))
    again = back.look_up({where: ids.tobytes()})[where]
    assert array("f", again.values).tolist() == [0.5] * 6
    assert again.version == 2


def table_client(opened: ExitStack, servers: ParameterServers, token: Token) -> TableClient:
    parameters = ParameterClient([servers.coordinator], lambda: token)
    opened.callback(parameters.close)
    parameters.place([], [TABLE])
    client = TableClient([servers.coordinator], lambda: token, timeout_s=20.0)
    opened.callback(client.close)
    client.fetch_map()
    return client


def test_a_restore_from_a_damaged_file_loses_the_shards(opened: ExitStack, tmp_path: Path) -> None:
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    member.push()
    manifest = snapshots.take().manifest
    path = tmp_path / "snapshots" / "job" / manifest.parts[2].file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    servers.expel("m")
    with pytest.raises(SnapshotDamaged) as raised:
        snapshots.restore()
    assert raised.value.details == {"file": manifest.parts[2].file, "shard": "2"}
    # The servers have dropped their shards: each is recorded as lost, with the reason.
    entry = servers.run(records.read(servers.store, "job"))
    assert entry is not None
    for shard in entry.assignments.shards:
        assert shard.content is ShardContent.LOST
        assert shard.loss is not None
        assert "Restoring snapshot 1 failed" in shard.loss.snapshot
    with pytest.raises(StateLost, match=manifest.parts[2].file):
        pusher(opened, servers, "late")
    path.write_bytes(whole)
    snapshots.restore(under_members=True)
    member = pusher(opened, servers, "m2")
    assert elements(member.values) == {-1.0}


def test_a_restore_that_cannot_write_its_records_changes_nothing(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers drop their shards only once the records name the servers that load them. So each
    shard has a primary or is lost, even if a coordinator or etcd ends in between."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    member.push()
    snapshots.take()
    before = servers.run(records.read(servers.store, "job"))

    async def away(*args: object, **more: object) -> None:
        raise Unavailable("etcd is away")

    with monkeypatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(records, "place", away)
        snapshots.restore(under_members=True)
    after = servers.run(records.read(servers.store, "job"))
    assert before is not None and after is not None
    assert after.assignments == before.assignments
    member.push()
    assert elements(member.values) == {-2.0}


def test_a_server_that_leaves_gets_no_restored_shards(opened: ExitStack, tmp_path: Path) -> None:
    """A restore gives shards only to servers that stay: shards on a leaving server would be lost
    when it ends."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.take()
    servers.run(servers.servers["ps-0"].registration.announce_leaving())
    assert snapshots.restore(under_members=True).servers == ["ps-1"]
    assert elements(pusher(opened, servers, "n").values) == {-1.0}


def test_a_snapshot_after_a_restore_has_whole_pushes(opened: ExitStack, tmp_path: Path) -> None:
    """Pushes that the restore discarded do not count as missing from a shard."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    member.push()
    snapshots.take()
    member.push()
    snapshots.restore(under_members=True)
    manifest = snapshots.take().manifest
    assert manifest.partial_steps == []
    assert manifest.steps == {member.session: 1}


def test_a_dead_server_that_is_still_registered_gets_no_restored_shards(
    opened: ExitStack, tmp_path: Path
) -> None:
    """etcd still lists the server, at whose address another process listens."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.take()
    gone = {"address": servers.servers["ps-0"].address, "incarnation": "gone"}
    servers.run(servers.store.put(keys.server("ps-9"), json.dumps(gone).encode()))
    assert snapshots.restore(under_members=True).servers == ["ps-0", "ps-1"]
    assert elements(pusher(opened, servers, "n").values) == {-1.0}


def test_shards_that_an_ended_server_was_to_load_go_to_the_other(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends when it is called to load. The other one is called once for its own shards
    and once for these."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.take()
    call, num_loads = ServerCalls.call, Counter[str]()
    leaving = servers.servers["ps-0"]

    async def after_its_end(calls: ServerCalls, address: str, *what: Any) -> Any:
        num_loads[address] += 1
        if address == leaving.address:
            await servers.stopped("ps-0")
        return await call(calls, address, *what)

    with monkeypatch.context() as patch:
        patch.setattr(ServerCalls, "call", after_its_end)
        restored = snapshots.restore(under_members=True)
    assert restored.servers == ["ps-1"]
    assert num_loads == {leaving.address: 1, servers.servers["ps-1"].address: 2}
    assert elements(pusher(opened, servers, "n").values) == {-1.0}


def test_restored_shards_that_are_lost_at_once_had_the_snapshots_version(
    opened: ExitStack, tmp_path: Path
) -> None:
    """The coordinator has not measured the servers yet. Initial values count as version 1."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    for _ in range(3):
        member.push()
    snapshots.take()
    snapshots.restore(under_members=True)
    for name in ("ps-0", "ps-1"):
        servers.stop(name)
    servers.add("ps-2")
    with pytest.raises(StateLost, match="at least version 4") as lost:
        pusher(opened, servers, "n")
    assert lost.value.details["at_least_version"] == "4"


def test_a_restore_that_fails_does_not_undo_a_later_one(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other restore begins and ends while the first one waits for a server."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.take()
    load_all = SnapshotLoader.load_all

    async def both() -> None:
        begun, is_over = asyncio.Event(), asyncio.Event()

        async def first_fails(loader: SnapshotLoader, *what: Any) -> JobAssignments:
            if not begun.is_set():
                begun.set()
                await is_over.wait()
                raise Unavailable("its server is away")
            return await load_all(loader, *what)

        monkeypatch.setattr(SnapshotLoader, "load_all", first_fails)
        first = asyncio.create_task(snapshots.restoring(under_members=True))
        await begun.wait()
        await snapshots.restoring(under_members=True)
        is_over.set()
        with pytest.raises(Unavailable):
            await first

    servers.run(both())
    assert elements(pusher(opened, servers, "n").values) == {-1.0}


def test_a_cluster_with_empty_servers_continues_from_the_newest_snapshot(
    opened: ExitStack, tmp_path: Path
) -> None:
    """The member's next push counts, although it was computed on later values."""
    servers, snapshots = start(opened, tmp_path)
    policy = SnapshotPolicy(url=str(tmp_path / "snapshots"))
    member = pusher(opened, servers, "m")
    for _ in range(3):
        member.push()
    snapshots.take()
    member.push()
    assert elements(member.values) == {-4.0}
    servers.restore_lost = snapshots.service(policy).restore_lost
    for name in ("ps-0", "ps-1"):
        servers.stop(name)
    for name in ("ps-2", "ps-0", "ps-1"):
        servers.add(name)
    member.push()
    assert elements(member.values) == {-4.0}

    def is_spread() -> bool:
        shards = member.client.fetch_map().shards
        return {each.server_id for each in shards} == set(servers.servers)

    awaited(is_spread, 60.0, "each of the three has shards")


def test_a_loss_that_was_accepted_while_storage_was_slow_is_not_restored(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator accepts the loss before the manifest is read, and the members train on."""
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    member = pusher(opened, servers, "m")
    member.push()
    snapshots.take()
    service = snapshots.service(SnapshotPolicy(url=str(tmp_path / "snapshots")))
    servers.lose("ps-0")
    find, reading, may_read = SnapshotLibrary.find, threading.Event(), threading.Event()
    opened.callback(may_read.set)

    def slow(library: SnapshotLibrary, number: int = 0, cut_id: str = "") -> Manifest:
        reading.set()
        may_read.wait(20.0)
        return find(library, number, cut_id)

    monkeypatch.setattr(SnapshotLibrary, "find", slow)
    with ThreadPoolExecutor(1) as pool:
        restoring = pool.submit(snapshots.restore_lost, service)
        assert reading.wait(20.0)
        servers.accept_loss()
        later = pusher(opened, servers, "n", weight=5.0)
        later.push()
        may_read.set()
        with pytest.raises(NothingLost, match="recovered or given up"):
            restoring.result()
    assert elements(later.values) == {-5.0}
    later.push()
    assert elements(later.values) == {-10.0}


def test_samples_that_were_trained_on_between_snapshot_and_restore_are_leased_again(
    opened: ExitStack, tmp_path: Path
) -> None:
    """The updates of these samples are undone: the member's report does not count any more."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    coordinators = opened.enter_context(closing(Coordinators([servers.coordinator])))
    token = servers.admit("m")
    samples = SampleClient(coordinators, lambda: token, dataset_size=8, num_epochs=1)
    leased = samples.lease(4).range
    assert leased is not None
    snapshots.cursor = servers.run(servers.samples.ledger_json("job"))
    snapshots.take()
    member.push()
    snapshots.restore(under_members=True)
    servers.samples.close_replaced("job")
    late = samples.lease(4, [leased])
    counts = servers.run(servers.samples.counts("job"))
    assert counts is not None and counts.completed == 0
    assert late.range == leased
    samples.lease(4, [leased])
    counts = servers.run(servers.samples.counts("job"))
    assert counts is not None and counts.completed == 4


def test_a_lost_job_is_restored_only_from_snapshots_of_its_own_lineage(
    opened: ExitStack, tmp_path: Path
) -> None:
    """A newer snapshot at the same place is of another cluster, as is one of the same number. Those
    of an earlier run stay behind when its records in etcd are gone."""
    servers, snapshots = start(opened, tmp_path)
    service = snapshots.service(SnapshotPolicy(url=str(tmp_path / "snapshots")))
    member = pusher(opened, servers, "m")
    member.push()
    own = snapshots.take().manifest
    later_s = own.taken_unix_s + 1
    other = replace(own, lineage="another", cut_id="another", taken_unix_s=later_s)
    for number in (own.number, own.number + 1):
        snapshots.library.commit(replace(other, number=number))
    # The restored shards have no snapshot of their own yet. If they are lost again, the same
    # snapshot is used.
    for _ in range(2):
        assert snapshots.restore_lost(service).is_restored
        source = servers.run(restored_from.read(servers.store, "job"))
        assert source is not None and (source.number, source.cut_id) == (own.number, own.cut_id)
    member.push()
    servers.run(servers.store.delete(keys.job_prefix("job"), prefix=True))
    tried = snapshots.restore_lost(service)
    assert not tried.is_restored
    assert "No snapshot of its present shards is at" in tried.reason
    member.push()
    assert elements(member.values) == {-3.0}


@pytest.mark.long
def test_an_automatic_restore_does_not_undo_a_restore_of_an_older_snapshot(
    opened: ExitStack, tmp_path: Path
) -> None:
    """A lost shard is restored from the snapshot that the operator chose, until a newer one was
    taken of the restored state."""
    servers, snapshots = start(opened, tmp_path)
    service = snapshots.service(SnapshotPolicy(url=str(tmp_path / "snapshots")))
    member = pusher(opened, servers, "m")
    for _ in range(2):
        member.push()
        snapshots.take()

    def lost_and_restored() -> set[float]:
        assert snapshots.restore_lost(service).is_restored
        return elements(pusher(opened, servers, "n").values)

    snapshots.restore(1, under_members=True)
    assert lost_and_restored() == {-1.0}
    assert lost_and_restored() == {-1.0}
    member = pusher(opened, servers, "o")
    for _ in range(4):
        member.push()
    assert snapshots.take().manifest.number == 3
    assert lost_and_restored() == {-5.0}
    snapshots.restore(2, under_members=True)
    snapshots.library.keep_newest(1)
    tried = snapshots.restore_lost(service)
    assert not tried.is_restored
    assert "Its snapshot 2 is not at" in tried.reason


def test_a_snapshot_during_which_the_job_is_restored_is_of_the_restored_shards(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is slow to list the earlier snapshots. If the shards are lost again, the job is
    restored from this snapshot."""
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m").push()
    before = snapshots.take().manifest
    newest, listing, may_list = SnapshotLibrary.newest, threading.Event(), threading.Event()
    opened.callback(may_list.set)

    def slow(library: SnapshotLibrary) -> Manifest | None:
        listing.set()
        may_list.wait(20.0)
        return newest(library)

    monkeypatch.setattr(SnapshotLibrary, "newest", slow)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(snapshots.take)
        assert listing.wait(20.0)
        snapshots.restore(under_members=True)
        may_list.set()
        manifest = taking.result().manifest
    lineage = servers.run(servers.store.get(keys.lineage("job")))
    assert lineage is not None
    assert manifest.lineage == lineage.value.decode() != before.lineage


def test_a_cut_of_shards_that_a_restore_replaces_meanwhile_is_not_used(
    opened: ExitStack, tmp_path: Path
) -> None:
    """The restore has written its records, and the servers still have the shards from before."""
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m")
    cursors = 0

    async def restored_at_first(job: str) -> None:
        nonlocal cursors
        cursors += 1
        if cursors == 1:
            await servers.store.put(keys.lineage(job), b"restored")

    calls = ServerCalls()
    opened.callback(lambda: servers.run(calls.close()))
    state = JobPosition(cursor=restored_at_first, training=lambda job: {})
    taken = servers.run(SnapshotTaker(servers.store, calls, state).take(snapshots.library))
    assert (taken.manifest.lineage, cursors) == ("restored", 2)


def test_a_snapshot_of_a_job_that_is_removed_meanwhile_leaves_no_record(
    opened: ExitStack, tmp_path: Path
) -> None:
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m")

    async def removed(job: str) -> None:
        await servers.store.delete(keys.job_prefix(job), prefix=True)
        await servers.store.delete(keys.assignments(job), prefix=True)

    calls = ServerCalls()
    opened.callback(lambda: servers.run(calls.close()))
    taker = SnapshotTaker(
        servers.store, calls, JobPosition(cursor=removed, training=lambda job: {})
    )
    with pytest.raises(SnapshotFailed, match="has no shards"):
        servers.run(taker.take(snapshots.library))
    assert servers.run(servers.store.keys(keys.job_prefix("job"))) == ()


def test_a_cut_of_an_earlier_epoch_of_a_shard_is_not_used(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary has not read yet that its shard was restored, and so has a later epoch."""
    servers, snapshots = start(opened, tmp_path, num_servers=1)
    pusher(opened, servers, "m")
    read, num_read = records.read, 0

    async def later_at_first(store: Keyspace, job: str) -> records.StoredAssignments | None:
        nonlocal num_read
        num_read += 1
        stored = await read(store, job)
        if stored is None or num_read > 1:
            return stored
        later = tuple(replace(each, epoch=each.epoch + 1) for each in stored.assignments.shards)
        return replace(stored, assignments=replace(stored.assignments, shards=later))

    monkeypatch.setattr(records, "read", later_at_first)
    assert snapshots.take().manifest.number == 1
    assert num_read == 2


def test_a_lost_job_without_a_snapshot_is_not_restored(opened: ExitStack, tmp_path: Path) -> None:
    _, snapshots = start(opened, tmp_path)
    policy = SnapshotPolicy(url=str(tmp_path / "snapshots"))
    tried = snapshots.restore_lost(snapshots.service(policy))
    assert not tried.is_restored
    assert (
        tried.reason == f"No snapshot of its present shards is at {snapshots.library.storage.url}."
    )
    tried = snapshots.restore_lost(snapshots.service(SnapshotPolicy()))
    assert not tried.is_restored
    assert "--snapshot-url" in tried.reason


@pytest.mark.long
def test_snapshots_of_a_job_do_not_wait_for_the_storage_of_another(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one job's snapshots hangs; the policy's snapshots of the other are taken."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m").start()
    token = servers.admit("m", job="a-stuck")
    stuck = opened.enter_context(closing(ParameterClient([servers.coordinator], lambda: token)))
    stuck.place(SCHEMA)
    newest, is_over = SnapshotLibrary.newest, threading.Event()
    opened.callback(is_over.set)

    def hanging(library: SnapshotLibrary) -> Manifest | None:
        if library.job == "a-stuck":
            is_over.wait(60.0)
        return newest(library)

    monkeypatch.setattr(SnapshotLibrary, "newest", hanging)
    policy = SnapshotPolicy(url=str(tmp_path / "snapshots"), every_s=0.2, num_kept=2)
    working = AsyncExitStack()
    servers.run(working.enter_async_context(snapshots.service(policy).working(servers.store)))
    give_up_s = time.monotonic() + 30.0
    while (taken := newest(snapshots.library)) is None or taken.number < 3:
        assert time.monotonic() < give_up_s, "the job waits for the other one"
        member.wait_for_more(1)
    is_over.set()
    servers.run(working.aclose())
    member.stop()


@pytest.mark.long
def test_snapshots_are_taken_and_removed_by_the_policy(opened: ExitStack, tmp_path: Path) -> None:
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m").start()
    policy = SnapshotPolicy(url=str(tmp_path / "snapshots"), every_s=0.2, num_kept=2)
    working = AsyncExitStack()
    servers.run(working.enter_async_context(snapshots.service(policy).working(servers.store)))
    give_up_s = time.monotonic() + 60.0
    while (newest := snapshots.library.newest()) is None or newest.number < 5:
        assert time.monotonic() < give_up_s
        member.wait_for_more(1)
    servers.run(working.aclose())
    member.stop()
    manifests = snapshots.library.list()
    assert 2 <= len(manifests) <= 3 and manifests[0].number >= 3
    for manifest in manifests:
        assert len(images(snapshots.library, manifest)) == 6


@pytest.mark.parametrize("fields", [{"every_s": 5.0}, {"num_kept": 0}, {"every_s": -1.0}])
def test_an_invalid_policy_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidSpec):
        SnapshotPolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cursor", [{"format": 1}, {"format": 9}, {"format": 1, "dataset_size": "x", "num_epochs": 1}]
)
def test_a_snapshot_with_an_invalid_ledger_changes_nothing(
    opened: ExitStack, tmp_path: Path, cursor: dict[str, object]
) -> None:
    """Written to etcd, such a ledger would quarantine the job."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    snapshots.cursor = cursor
    snapshots.take()
    before = servers.run(records.read(servers.store, "job"))
    with pytest.raises(SnapshotDamaged, match="does not fit together"):
        snapshots.restore(under_members=True)
    assert servers.run(records.read(servers.store, "job")) == before
    assert servers.run(servers.store.get(keys.sample_ledger("job"))) is None


def test_callers_may_use_only_locations_below_the_roots(opened: ExitStack, tmp_path: Path) -> None:
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    root = tmp_path / "snapshots"
    service = snapshots.service(SnapshotPolicy(roots=[str(root)]))

    async def take(url: str) -> pb.SnapshotSummary:
        return await service.Take(pb.TakeSnapshotRequest(job="job", url=url), None)  # type: ignore[arg-type]

    async def listing(url: str) -> pb.ListSnapshotsReply:
        return await service.List(pb.ListSnapshotsRequest(job="job", url=url), None)  # type: ignore[arg-type]

    assert servers.run(take(f"{root}/below")).number == 1
    assert len(servers.run(listing(f"file://{root}/below")).snapshots) == 1
    for url in (str(tmp_path / "elsewhere"), "/tmp", "s3://bucket/x"):
        for asking in (take, listing):
            with pytest.raises(AccessDenied, match="snapshots"):
                servers.run(asking(url))
    for url in ("reference::data:application/json;base64,e30=", f"{root}/../x", "http://x/y", ""):
        with pytest.raises(InvalidSpec):
            servers.run(listing(url))
    (root / "below" / "job" / "manifests").joinpath("000000007-x.json").write_text("{}")
    (damaged,) = servers.run(listing(f"{root}/below")).damaged
    assert "000000007-x.json" in damaged


def test_a_server_opens_only_locations_below_the_roots(opened: ExitStack, tmp_path: Path) -> None:
    """The server reads the roots from etcd, so that no caller can add one."""
    servers, _ = start(opened, tmp_path)
    with grpc.insecure_channel(servers.servers["ps-0"].address) as channel:
        stub = ShardSnapshotsStub(channel)

        def refused(request: pb.WriteRequest | pb.LoadRequest) -> ShoalError:
            call = stub.Write if isinstance(request, pb.WriteRequest) else stub.Load
            with pytest.raises(grpc.RpcError) as raised:
                call(request, timeout=10.0)  # type: ignore[operator]
            return from_rpc_error(raised.value, "ps-0")

        asked = {"job": "job", "cut_id": "c", "number": 1}
        for url in (str(tmp_path / "elsewhere"), "reference::data:text/plain,x", ""):
            error = refused(pb.WriteRequest(url=url, **asked))  # type: ignore[arg-type]
            assert isinstance(error, AccessDenied | InvalidSpec)
            assert isinstance(
                refused(pb.LoadRequest(job="job", url=url)), AccessDenied | InvalidSpec
            )
        bad_cut = asked | {"cut_id": "../../out"}
        url = str(tmp_path / "snapshots")
        assert isinstance(refused(pb.WriteRequest(url=url, **bad_cut)), InvalidSpec)  # type: ignore[arg-type]
        servers.run(servers.store.delete(keys.SNAPSHOT_ROOTS))
        assert isinstance(refused(pb.LoadRequest(job="job", url=url)), AccessDenied)
    assert not (tmp_path / "elsewhere").exists()


def test_the_leader_writes_its_roots_to_etcd(opened: ExitStack, tmp_path: Path) -> None:
    servers, _ = start(opened, tmp_path)
    policy = SnapshotPolicy(url="s3://bucket/a", roots=["/srv/snapshots", "s3://bucket/a"])
    limits = Limits(heartbeat_s=0.5, join_s=60.0)
    options = ParameterOptions(snapshots=policy)
    coordinator = Coordinator(servers.store, limits, parameters=options)

    async def lead() -> None:
        async with coordinator.running():
            await coordinator.lead(())
            await coordinator.step_down()

    servers.run(lead())
    found = servers.run(snapshot_roots.read(servers.store))
    assert found == ("s3://bucket/a", "/srv/snapshots")


class SlowLibrary(SnapshotLibrary):
    """Library that commits only when the test allows it."""

    def __init__(self, library: SnapshotLibrary) -> None:
        super().__init__(library.storage, library.job)
        self.begun, self.may_commit = threading.Event(), threading.Event()

    def commit(self, manifest: Manifest) -> None:
        self.begun.set()
        assert self.may_commit.wait(60.0)
        super().commit(manifest)


def test_a_snapshot_cancelled_during_its_commit_is_whole(opened: ExitStack, tmp_path: Path) -> None:
    """A coordinator whose term ends cancels it; the thread still commits."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m").push()
    library = snapshots.library = SlowLibrary(snapshots.library)

    async def cancelled() -> None:
        taking = asyncio.create_task(snapshots.taking())
        await asyncio.to_thread(library.begun.wait)
        taking.cancel()
        # The cancellation is delivered before the commit continues.
        await asyncio.sleep(0)
        library.may_commit.set()
        with suppress(asyncio.CancelledError):
            await taking

    servers.run(cancelled())
    (manifest,) = library.list()
    assert len(images(library, manifest)) == 6


def test_an_undecided_commit_leaves_a_complete_snapshot_or_none(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage publishes the manifest, and its answer is lost."""
    servers, snapshots = start(opened, tmp_path)
    member = pusher(opened, servers, "m")
    storage = snapshots.library.storage
    publish, remove = storage.publish, storage.remove

    def publish_unanswered(draft: str, path: str) -> None:
        publish(draft, path)
        raise Unavailable("the answer is lost")

    def remove_no_manifest(paths: Iterable[str]) -> None:
        wanted = list(paths)
        if any("/manifests/" in path for path in wanted):
            raise Unavailable("the storage is away")
        remove(wanted)

    with monkeypatch.context() as patches:
        patches.setattr(storage, "publish", publish_unanswered)
        with pytest.raises(Unavailable, match="the answer is lost"):
            snapshots.take()
        assert snapshots.library.list() == [] and storage.sizes("job") == {}
        patches.setattr(storage, "remove", remove_no_manifest)
        with pytest.raises(Unavailable, match="the answer is lost"):
            snapshots.take()
    (whole,) = snapshots.library.list()
    assert len(images(snapshots.library, whole)) == 6
    # Its files are reused, as those of any snapshot.
    assert snapshots.take().manifest.parts == whole.parts
    member.push()
    assert snapshots.take().manifest.number == whole.number + 2


def test_files_of_a_failed_snapshot_are_removed_with_the_next_one_at_any_url(
    opened: ExitStack, tmp_path: Path
) -> None:
    """The storage failed while the files were to be removed. At a URL that is not the policy's, all
    snapshots stay."""
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m")
    storage = snapshots.library.storage
    storage.write("job/parts/000000001-failed/shard-00000.safetensors", b"left behind")
    service = snapshots.service(SnapshotPolicy(roots=[storage.url]))
    for number in (1, 2, 3, 4):
        assert servers.run(service.take("job", storage.url)).number == number
    manifests = snapshots.library.list()
    assert [each.number for each in manifests] == [1, 2, 3, 4]
    needed = {f"job/{part.file}" for each in manifests for part in each.parts}
    assert set(storage.sizes("job/parts")) == needed


def test_a_snapshot_of_another_model_is_not_restored(opened: ExitStack, tmp_path: Path) -> None:
    servers, snapshots = start(opened, tmp_path)
    pusher(opened, servers, "m")
    manifest = snapshots.take().manifest
    layout = manifest.layout.replace(b"w5", b"v5")
    changed = Manifest(**{**vars(manifest), "layout": layout, "number": 2})
    snapshots.library.commit(changed)
    servers.expel("m")
    with pytest.raises(ProposalConflict, match="differ from those of the snapshot"):
        snapshots.restore()
    servers.stop("ps-0")
    servers.stop("ps-1")
    with pytest.raises(NoServers):
        snapshots.restore(1)
