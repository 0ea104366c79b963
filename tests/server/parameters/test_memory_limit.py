"""Servers at their memory limit refuse what needs more memory, with the reason, and continue."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters.memory_limits import (
    ADAM,
    DIM,
    MIB,
    MODEL,
    SGD,
    Embedder,
    connect,
    created,
    describe,
    drop,
    users,
)
from support.clusters.parameter_servers import ParameterServers, config
from support.models.table_specs import live, new_push, new_shard, new_table

from shoal_proto.errors import InvalidSpec, Overloaded
from shoal_proto.v1.optimizer_pb2 import (
    HyperParameters,
    OptimizerSpec,
    Phase,
    Schedule,
    StalenessPolicy,
    StepPhase,
)
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_proto.v1.tables_pb2 import Eviction, RowFate
from shoal_server.parameters.config import MEMORY_SHARE, default_limit_bytes
from shoal_server.parameters.shard.dense import bytes_to_make, new_dense_shard


@pytest.fixture
def servers() -> Iterator[ParameterServers]:
    """Start a server with memory for Adam on 2 MiB of parameters, and for 2 MiB more."""
    with ParameterServers(1, memory_limit_bytes=9 * MIB) as servers:
        yield servers


def test_the_error_of_a_create_beyond_the_limit_has_the_numbers_and_the_option(
    servers: ParameterServers,
) -> None:
    """The client repeats the call until its timeout; the existing job trains on. Once there is
    memory, the same client creates its shards."""
    trained = created(servers, ADAM, "first")
    other = connect(servers, "second", timeout_s=0.5)
    other.place(MODEL.schema)
    with pytest.raises(Overloaded) as refused:
        other.create(ADAM, MODEL.filled(0.0))
    assert "new shards of job second" in refused.value.what
    assert "--memory-limit-bytes" in refused.value.fix
    details = {name: int(value) for name, value in refused.value.details.items()}
    assert details["limit_bytes"] == 9 * MIB
    assert 6 * MIB < details["held_bytes"] < 7 * MIB
    assert 6 * MIB < details["asked_bytes"] < 7 * MIB
    trained.push(MODEL.filled(-1.0))
    described = describe(servers)
    assert described.memory_limit_bytes == 9 * MIB
    assert described.memory_bytes == details["held_bytes"]
    # The shards' record of the push may not be counted yet.
    assert 0 <= described.held_bytes - described.memory_bytes < 16 * 1024
    drop(servers, "first")
    assert other.create(ADAM, MODEL.filled(0.0)) > 0
    other.push(MODEL.filled(-1.0))
    trained.close()
    other.close()


def test_a_create_of_an_existing_shard_needs_no_memory(servers: ParameterServers) -> None:
    """Two jobs fit into the memory, and their shards may be created again."""
    first = created(servers, ADAM, "first")
    second = created(servers, SGD, "second")
    assert first.create(ADAM, MODEL.filled(0.0)) == 0
    assert second.create(SGD, MODEL.filled(0.0)) == 0
    for client in (first, second):
        client.push(MODEL.filled(-1.0))
        client.close()


def test_the_memory_of_a_new_shard_is_computed_before_it_is_made() -> None:
    """The size is right for each optimizer, schedule, staleness policy and dtype."""
    hyper = HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, momentum=0.5)
    schedule = Schedule(phases=[Phase(step=StepPhase(step_size=2, gamma=0.5))])
    adaptive = StalenessPolicy(kind="compensate", strength=0.1, decay=0.9, adaptive=True)
    blocks = [Block(parameter="p", num_elements=96), Block(parameter="q", num_elements=7)]
    for kind in ("sgd", "adagrad", "adam", "adamw", "outer"):
        for dtype in ("float32", "float64", "bfloat16"):
            for more in ({}, {"schedule": schedule}, {"staleness": adaptive}):
                optimizer = OptimizerSpec(kind=kind, groups=[hyper], **more)  # type: ignore[arg-type]
                spec = Shard(dtype=dtype, blocks=blocks)
                size = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
                shard = new_dense_shard(spec, optimizer, bytearray(103 * size))
                assert bytes_to_make(spec, optimizer) == shard.memory_bytes


@pytest.mark.long
def test_a_table_at_the_limit_gets_no_new_rows(servers: ParameterServers) -> None:
    """A push whose new rows exceed the memory is refused, and accepted once another job is dropped.
    Existing rows are trained meanwhile, and all ids can be looked up."""
    dense = created(servers, ADAM, "dense")
    member = Embedder(servers, users())
    first = range(2000)
    member.push(first)
    with pytest.raises(Overloaded) as refused:
        member.push(range(2000, 8000))
    assert "more rows in shard" in refused.value.what
    assert int(refused.value.details["asked_bytes"]) > 0
    assert describe(servers).held_bytes <= 9 * MIB
    member.push(first)
    assert member.look_up(range(8000)) == 8000 * DIM * 4
    dense.push(MODEL.filled(-1.0))
    drop(servers, "dense")
    result = member.push(range(2000, 8000))
    assert result.fates == {("users", 0): bytes([RowFate.ROW_FATE_MADE]) * 6000}
    dense.close()
    member.close()


def refuse_all(num_bytes: int) -> None:
    if num_bytes:
        raise Overloaded("full")


def test_new_rows_reuse_the_memory_of_evicted_ones() -> None:
    """A refused push changes nothing. A repetition of an applied push is answered at the limit as
    well."""
    shard = new_shard(new_table(eviction=Eviction(max_idle_s=8.0)))
    ones = [[1.0, 1.0]] * 64
    outcome = shard.push(new_push(range(64), ones, at_unix_s=1.0), live)
    before = shard.body.num_bytes
    later = {"sequence": 2, "base_version": 2}
    for at_unix_s in (2.0, 8.0):
        with pytest.raises(Overloaded):
            push = new_push([64, 65], ones[:2], at_unix_s=at_unix_s, **later)
            shard.push(push, live, refuse_all)
        assert (shard.version, len(shard.body.content)) == (2, 64)
    again = shard.push(new_push(range(64), ones, at_unix_s=1.0), live, refuse_all)
    assert again.is_duplicate
    assert again.version == outcome.version
    shard.push(new_push([], [], at_unix_s=5.0, sequence=3, base_version=2), live, refuse_all)
    shard.push(new_push([], [], at_unix_s=9.0, sequence=4, base_version=2), live, refuse_all)
    shard.push(new_push([64, 65], ones[:2], at_unix_s=13.0, **later), live, refuse_all)
    assert (len(shard.body.content), shard.body.num_bytes) == (2, before)


def test_a_full_table_that_evicts_its_oldest_rows_needs_no_memory() -> None:
    """A full table has the memory of all its rows already."""
    table = new_table(max_rows=64, eviction=Eviction(oldest_when_full=True))
    shard = new_shard(table)
    ones = [[1.0, 1.0]] * 64
    shard.push(new_push(range(64), ones, at_unix_s=1.0), live)
    push = new_push(range(100, 164), ones, at_unix_s=2.0, sequence=2, base_version=2)
    assert RowFate.ROW_FATE_FULL not in shard.push(push, live, refuse_all).fates


# --- the default ---


def cgroup(folder: Path, file: str, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"{limit}\n")


def own(folder: Path, lines: str) -> Path:
    path = folder / "own"
    path.write_text(lines)
    return path


def test_the_default_is_a_share_of_the_lowest_cgroup_limit(tmp_path: Path) -> None:
    """The limits of the process' cgroup and of its parents count; "max" is not a limit."""
    cgroup(tmp_path / "pod", "memory.max", str(64 * MIB))
    cgroup(tmp_path / "pod" / "server", "memory.max", "max")
    mine = own(tmp_path, "0::/pod/server\n")
    assert default_limit_bytes(tmp_path, mine) == int(MEMORY_SHARE * 64 * MIB)
    cgroup(tmp_path / "pod" / "server", "memory.max", str(16 * MIB))
    assert default_limit_bytes(tmp_path, mine) == int(MEMORY_SHARE * 16 * MIB)


def test_in_a_container_the_limit_at_the_root_counts(tmp_path: Path) -> None:
    """The process' path may be that of the host, which is not mounted in the container."""
    cgroup(tmp_path, "memory.max", str(32 * MIB))
    mine = own(tmp_path, "0::/kubepods/pod-7/container\n")
    assert default_limit_bytes(tmp_path, mine) == int(MEMORY_SHARE * 32 * MIB)


def test_limits_of_version_1_of_cgroups_count(tmp_path: Path) -> None:
    """The path of the memory controller counts, and that of no other controller."""
    cgroup(tmp_path / "memory" / "job", "memory.limit_in_bytes", str(8 * MIB))
    mine = own(tmp_path, "5:cpu,cpuacct:/other\n3:memory:/job\n")
    assert default_limit_bytes(tmp_path, mine) == int(MEMORY_SHARE * 8 * MIB)


def test_without_a_cgroup_limit_the_default_is_a_share_of_the_machine(tmp_path: Path) -> None:
    """Version 1 expresses "no limit" by a huge number."""
    unlimited = default_limit_bytes(tmp_path, tmp_path / "absent")
    assert unlimited > 64 * MIB
    cgroup(tmp_path / "memory", "memory.limit_in_bytes", "9223372036854771712")
    assert default_limit_bytes(tmp_path, own(tmp_path, "3:memory:/\n")) == unlimited


def test_a_limit_must_be_above_zero() -> None:
    """The error has the option."""
    with pytest.raises(InvalidSpec, match="--memory-limit-bytes; saw 0"):
        config("ps-0", memory_limit_bytes=0)
