"""A program for a Python with verl: actors and rollouts, made by verl's own registry.

python verl_program.py SERIES        prints a line of JSON for each attempt
"""

import asyncio
import json
import sys
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.utils import ensure_async_iterator


def say(**what: Any) -> None:
    print("result", json.dumps(what), flush=True)


def weights_of(value: float) -> Any:
    """Weights in the form of an actor's `get_per_tensor_param`."""
    for name, shape in (("embed.weight", (11, 4)), ("head.weight", (4, 11)), ("norm", (4,))):
        yield name, torch.full(shape, value, dtype=torch.bfloat16)


async def main(series: str) -> None:
    import_external_libs("shoal.integrations.verl")
    engine = CheckpointEngineRegistry.get("shoal")
    options = {"bucket_size": 1 << 20, "series": series}
    actor = CheckpointEngineRegistry.new("shoal", is_master=True, **options)
    other, rollout, late = (CheckpointEngineRegistry.new("shoal", **options) for _ in range(3))
    metadata = [each.prepare() for each in (actor, other, rollout)]
    actors, rollouts = engine.build_topology(2, 1, metadata)
    say(what="topology", actors=actors, rollouts=rollouts, wire_format=engine.wire_format)
    for step in (10, 20):
        await synchronised((actor, other), rollout, step, float(step))
    tensors = await taken(late, None)
    say(what="late", value=float(tensors["norm"][0]))
    # The training starts again at step 10, with other weights, and so does a rollout.
    anew = CheckpointEngineRegistry.new("shoal", **options)
    await synchronised((actor, other), anew, 10, 11.0)
    # Then once more, to the rollout that has received step 10 before.
    await synchronised((actor, other), rollout, 10, 12.0)


async def synchronised(actors: tuple[Any, Any], rollout: Any, step: int, value: float) -> None:
    """Synchronise as CheckpointEngineManager does: the rollout asks before the actors send."""
    engine = CheckpointEngineRegistry.get("shoal")
    everyone = [*actors, rollout]
    settings = engine.build_topology(2, 1, [each.prepare() for each in everyone])
    for group, given in zip((actors, [rollout]), settings, strict=True):
        for rank, each in enumerate(group):
            each.init_process_group(**{name: values[rank] for name, values in given.items()})
    received = asyncio.create_task(taken(rollout, step))
    await asyncio.sleep(0)
    actor, other = actors
    await other.send_weights(weights_of(value), global_steps=step)
    version = await actor.send_weights(weights_of(value), global_steps=step)
    tensors = await received
    same = all(torch.equal(tensors[name], each) for name, each in weights_of(value))
    say(what="synchronised", step=step, version=version.number, same=same, names=len(tensors))
    for each in everyone:
        each.finalize()


async def taken(rollout: Any, step: int | None) -> dict[str, torch.Tensor]:
    """Collect the weights, as a server adapter takes them from the generator."""
    found = {}
    async for name, tensor in ensure_async_iterator(rollout.receive_weights(global_steps=step)):
        found[name] = tensor.clone()
    return found


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
