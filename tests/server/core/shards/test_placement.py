"""Cutting into shards and placing them: complete, balanced and deterministic."""

import random
from dataclasses import replace

import pytest

from shoal_proto.dtypes import DTYPE_BYTES
from shoal_server.core.shards.placement import (
    CUT_ELEMENTS,
    LARGE_SHARD_BYTES,
    MAX_LARGE_SHARDS,
    MAX_SHARDS,
    MIN_SPLIT_BYTES,
    Parameter,
    SchemaProblem,
    Shard,
    check_schema,
    cut_into_shards,
    find_differences,
    least_loaded,
    max_block_bytes,
    place,
    schema_digest,
    skew,
    spread_tables,
)

MAX_SKEW = 1.05


def parameter(name: str, *shape: int, dtype: str = "float32", group: int = 0) -> Parameter:
    return Parameter(name=name, shape=shape, dtype=dtype, group=group)


def tiny() -> list[Parameter]:
    return [
        parameter("conv1.weight", 16, 1, 3, 3),
        parameter("conv1.bias", 16),
        parameter("conv2.weight", 32, 16, 3, 3),
        parameter("conv2.bias", 32),
        parameter("fc1.weight", 64, 512),
        parameter("fc1.bias", 64),
        parameter("fc2.weight", 10, 64),
        parameter("fc2.bias", 10),
    ]


def transformer(layers: int, width: int, vocabulary: int) -> list[Parameter]:
    """Return a model whose weights decay (group 0), and biases and norms do not (group 1)."""
    parameters = [parameter("embedding", vocabulary, width)]
    for i in range(layers):
        parameters += [
            parameter(f"{i}.qkv", 3 * width, width),
            parameter(f"{i}.out", width, width),
            parameter(f"{i}.up", 4 * width, width),
            parameter(f"{i}.down", width, 4 * width),
            *(parameter(f"{i}.norm{n}", width, group=1) for n in range(4)),
        ]
    return parameters


MODELS = {
    "tiny": tiny(),
    "linear": [parameter("weight", 10, 784), parameter("bias", 10)],
    "gpt2": transformer(12, 768, 50257),
    "billion": transformer(24, 1792, 50257),
    "one tensor": [parameter("table", 1_000_003, 25)],
}


def assert_covers(parameters: list[Parameter], shards: tuple[Shard, ...]) -> None:
    held: dict[str, list[tuple[int, int]]] = {}
    by_name = {p.name: p for p in parameters}
    most = max_block_bytes(sum(p.num_bytes for p in parameters))
    for shard in shards:
        for block in shard.blocks:
            p = by_name[block.parameter]
            assert (p.dtype, p.group) == (shard.dtype, shard.group)
            assert 0 < block.num_elements * DTYPE_BYTES[p.dtype] <= most
            assert block.offset % CUT_ELEMENTS == 0
            held.setdefault(p.name, []).append((block.offset, block.num_elements))
    for p in parameters:
        end = 0
        for offset, num_elements in sorted(held.get(p.name, [])):
            assert offset == end
            end += num_elements
        assert end == p.num_elements


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7])
def test_ordinary_models_are_spread_evenly(name: str, num_servers: int) -> None:
    """Shards contain each element once, and no server has over 5 % more than the mean, unless the
    model is too small for so many servers."""
    shards = cut_into_shards(MODELS[name], num_servers)
    assert_covers(MODELS[name], shards)
    placed = place(shards, [f"ps-{i}" for i in range(num_servers)])
    assert [p.shard.shard_id for p in placed] == list(range(len(shards)))
    num_bytes = sum(p.num_bytes for p in MODELS[name])
    is_split = num_bytes >= num_servers * MIN_SPLIT_BYTES
    assert skew(placed, num_servers) <= (MAX_SKEW if is_split else num_servers)


def test_the_number_of_shards_follows_the_size() -> None:
    """A tiny model is one shard for any number of servers, a small one has two for two servers, and
    a large one has hundreds, up to a bound."""
    assert [len(cut_into_shards(MODELS["linear"], n)) for n in (1, 2, 8)] == [1, 1, 1]
    assert len(cut_into_shards(MODELS["tiny"], 2)) == 2
    assert 200 <= len(cut_into_shards(MODELS["gpt2"], 2)) <= MAX_SHARDS + 4
    assert 400 <= len(cut_into_shards(MODELS["billion"], 4)) <= MAX_SHARDS + 8


def test_a_model_of_a_terabyte_has_thousands_of_shards_of_few_blocks() -> None:
    """Shards are small enough to move one by one, the shard map fits into a message, and loads are
    even."""
    parameters = transformer(160, 11400, 50257)
    assert sum(p.num_bytes for p in parameters) >= 1e12
    shards = cut_into_shards(parameters, 100)
    assert_covers(parameters, shards)
    assert 3000 <= len(shards) <= MAX_LARGE_SHARDS + 2 * 100
    assert max(shard.num_bytes for shard in shards) <= 1.2 * LARGE_SHARD_BYTES
    assert sum(len(shard.blocks) for shard in shards) <= 10 * len(shards)
    placed = place(shards, [f"ps-{i}" for i in range(100)])
    assert skew(placed, 100) <= MAX_SKEW


@pytest.mark.parametrize("seed", range(20))
def test_the_shards_of_any_schema_are_complete_and_deterministic(seed: int) -> None:
    """The schemas have random shapes, dtypes and groups."""
    rng = random.Random(seed)
    parameters = [
        parameter(
            f"p{i}",
            *(rng.randrange(0, 300) for _ in range(rng.randrange(0, 4))),
            dtype=rng.choice(list(DTYPE_BYTES)),
            group=rng.randrange(3),
        )
        for i in range(rng.randrange(1, 30))
    ]
    num_servers = rng.randrange(1, 6)
    shards = cut_into_shards(parameters, num_servers)
    assert_covers(parameters, shards)
    assert shards == cut_into_shards(parameters, num_servers)
    servers = [f"ps-{i}" for i in range(num_servers)]
    assert place(shards, servers) == place(shards, reversed(servers))


def test_differences_between_schemas_are_named() -> None:
    """Missing, extra, reshaped, recast and regrouped parameters are each reported."""
    expected = [parameter(n, 4, 3) for n in ("same", "gone", "shape", "dtype", "group")]
    seen = [
        expected[0],
        parameter("extra", 1),
        replace(expected[2], shape=(3, 4)),
        replace(expected[3], dtype="float16"),
        replace(expected[4], group=1),
    ]
    differences = {d.parameter: (d.seen, d.expected) for d in find_differences(seen, expected)}
    assert differences == {
        "gone": ("(absent)", "float32 4x3 in group 0"),
        "extra": ("float32 1 in group 0", "(absent)"),
        "shape": ("float32 3x4 in group 0", "float32 4x3 in group 0"),
        "dtype": ("float16 4x3 in group 0", "float32 4x3 in group 0"),
        "group": ("float32 4x3 in group 1", "float32 4x3 in group 0"),
    }
    assert find_differences(expected, expected) == ()


def test_the_digest_depends_on_the_schema_but_not_on_its_order() -> None:
    """Another shape of one parameter changes it."""
    parameters = tiny()
    assert schema_digest(parameters) == schema_digest(list(reversed(parameters)))
    changed = [replace(parameters[0], shape=(1, 16, 3, 3)), *parameters[1:]]
    assert schema_digest(parameters) != schema_digest(changed)


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ([], "no elements"),
        ([parameter("a", 0)], "no elements"),
        ([parameter("a", 1), parameter("a", 1)], "each name once"),
        ([parameter("a", 1, dtype="int64")], "int64"),
        ([parameter("small", 1), parameter("huge", 2**62)], "huge"),
        ([parameter("a", *[2**53 - 1] * 64)], "the model is too large"),
        ([parameter(str(i), 2**47) for i in range(3)], "the model is too large"),
    ],
)
def test_bad_schemas_are_refused(parameters: list[Parameter], fragment: str) -> None:
    """The message has the problem."""
    with pytest.raises(SchemaProblem, match=fragment):
        check_schema(parameters)


def test_the_shards_of_tables_go_to_servers_in_turn() -> None:
    """The order in which the servers are listed does not matter."""
    spread = spread_tables({"users": 5, "items": 3}, ["b", "c", "a"])
    assert [(table, index) for table, index, _ in spread] == [
        *(("items", index) for index in range(3)),
        *(("users", index) for index in range(5)),
    ]
    assert [server for _, _, server in spread] == list("abcabcab")
    assert spread_tables({"users": 5, "items": 3}, ["a", "b", "c"]) == spread


def test_jobs_of_one_shard_are_on_different_servers() -> None:
    """The server depends on the job's turn."""
    shards = cut_into_shards(MODELS["tiny"], 3)
    first = {place(shards, ["a", "b", "c"], turn)[0].server_id for turn in range(3)}
    assert first == {"a", "b", "c"}


def test_shards_go_to_the_servers_with_the_least_load() -> None:
    """The largest is placed first; of servers with equal loads the first one gets it."""
    num_bytes = {0: 10, 1: 40, 2: 20, 3: 10}
    assert least_loaded(num_bytes, ["a", "b"], {}) == {1: "a", 2: "b", 0: "b", 3: "b"}
    assert least_loaded(num_bytes, ["a", "b"], {"a": 50}) == {1: "b", 2: "b", 0: "a", 3: "a"}
