"""CPU time that a rank of a large job needs to plan the resharding after a change of members.

    make bench NAME=resharding
    .venv/bin/python bench/resharding.py 256 3000    # ranks, tensors

The time runs from the messages of all ranks to the plan of one rank, without network. The rank
reads which rows each of 1,000 ranks has, chooses the step, reads which rows each rank needs, and
plans. The 3,000 tensors are a transformer's parameters with two moments each, cut by rows; each
rank also has a copy of a peer's rows.

- `resharding_plan_lost`: a quarter of the ranks is lost, and the others cut the state into new
  parts.
- `resharding_plan_joined`: as many ranks have joined, and have no state yet.
- `resharding_plan_same`: all ranks already have the rows that they need.
- `resharding_message`: size of the message of one rank.
"""

import sys
import time
from statistics import median

import torch
from rows import Row, publish

from shoal.state.inventory import (
    Inventory,
    Meta,
    ShardListing,
    TensorTable,
    chunks_from_json,
    chunks_to_json,
    from_message,
    pack,
    to_message,
    unpack,
)
from shoal.state.shards import MODEL, OPTIM, Chunk, Json
from shoal.state.step_choice import choose
from shoal.state.transfer_plan import plan

NUM_RANKS, NUM_TENSORS, RUNS = 1000, 3000, 3
STEP, STRIPE_BYTES = 100, 128 * 1024
HIDDEN, INNER, VOCABULARY = 8192, 28672, 128256
BLOCK = {
    "attention.qkv": (10240, HIDDEN),
    "attention.out": (HIDDEN, HIDDEN),
    "mlp.gate": (INNER, HIDDEN),
    "mlp.up": (INNER, HIDDEN),
    "mlp.down": (HIDDEN, INNER),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
    "last": (1000, HIDDEN),
}


def tensors(count: int) -> dict[str, Meta]:
    """Return tensors by name: parameters of a transformer, and two moments of each."""
    metas: dict[str, Meta] = {}
    number = 0
    while len(metas) < count:
        for name, shape in BLOCK.items():
            path = f"layers.{number}.{name}"
            for key in (MODEL + path, f"{OPTIM}{path}/exp_avg", f"{OPTIM}{path}/exp_avg_sq"):
                metas[key] = Meta(shape, torch.float32)
        number += 1
    return dict(list(metas.items())[:count])


def rows(shape: tuple[int, ...], rank: int, num_ranks: int) -> Chunk | None:
    """Return a rank's rows, as torch.chunk cuts them; None if it has none."""
    size = -(-shape[0] // num_ranks)
    start = min(shape[0], rank * size)
    count = min(size, shape[0] - start)
    offsets, sizes = (start, *[0] * (len(shape) - 1)), (count, *shape[1:])
    return Chunk(offsets=offsets, sizes=sizes) if count else None


def chunks(metas: dict[str, Meta], rank: int, num_ranks: int) -> dict[str, Chunk]:
    by_shape = {meta.shape: rows(meta.shape, rank, num_ranks) for meta in metas.values()}
    found = {name: by_shape[meta.shape] for name, meta in metas.items()}
    return {name: chunk for name, chunk in found.items() if chunk is not None}


def message_of(metas: dict[str, Meta], parts: list[dict[str, Chunk]]) -> bytes:
    """Return the message of a rank with these chunks, its own and copies of its peer's."""
    values: dict[str, Json] = {"groups": [{"lr": 1e-4, "params": list(metas)[::3]}]}
    listings = [
        ShardListing(
            step=STEP, chunks=part, values=values, elsewhere=frozenset(metas) - part.keys()
        )
        for part in parts
    ]
    return to_message(Inventory(metas=metas if parts else {}, listings=listings))


def seconds(words: list[bytes], asked: list[bytes], rank: int) -> float:
    """Return the CPU seconds from the messages of all ranks to the plan of one of them."""
    began_s = time.process_time()
    chosen = choose([from_message(word, number) for number, word in enumerate(words)])
    table = TensorTable(chosen.metas)
    needs = [chunks_from_json(unpack(word, number), table) for number, word in enumerate(asked)]
    todo = plan(chosen, needs, rank, stripe_bytes=STRIPE_BYTES)
    took_s = time.process_time() - began_s
    moved = sum(map(len, todo.receives.values()))
    print(f"rank {rank}: {took_s:.2f} s, {len(todo.kept)} parts kept, {moved} received", flush=True)
    return took_s


def measure(num_ranks: int, num_tensors: int) -> list[Row]:
    metas = dict(sorted(tensors(num_tensors).items()))
    names = list(metas)

    def holding(rank: int, of: int) -> bytes:
        peer = (rank + 1) % of
        return message_of(metas, [chunks(metas, rank, of), chunks(metas, peer, of)])

    def asking(of: int) -> list[bytes]:
        return [pack(chunks_to_json(chunks(metas, rank, of), names, metas)) for rank in range(of)]

    few = 3 * num_ranks // 4
    whole = [holding(rank, num_ranks) for rank in range(num_ranks)]
    fewer = [holding(rank, few) for rank in range(few)]
    nothing = message_of(metas, [])
    cases = {
        # Every fourth rank is lost. The rank before each has a copy of its rows.
        "lost": ([word for rank, word in enumerate(whole) if rank % 4 != 3], asking(few)),
        "joined": ([*fewer, *[nothing] * (num_ranks - few)], asking(num_ranks)),
        "same": (whole, asking(num_ranks)),
    }
    found = []
    for name, (words, asked) in cases.items():
        taken = [seconds(words, asked, run * len(words) // RUNS) for run in range(RUNS)]
        metric = f"resharding_plan_{name}"
        found.append(Row(metric=metric, value=median(taken), unit="s", runs=RUNS))
    size = Row(metric="resharding_message", value=len(whole[0]) / 1024, unit="KiB", runs=1)
    return [*found, size]


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    num_ranks, num_tensors = given or (NUM_RANKS, NUM_TENSORS)
    publish("resharding", measure(num_ranks, num_tensors))


if __name__ == "__main__":
    main()
