"""How a member comes by its first values: from the servers, or as the one who brings them there."""

import time
from collections.abc import Callable

from shoal.strategies.asynchronous.shared_values import SharedValues
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import GenerationBroken, ShardNotReady
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec

PATIENCE_SHARE = 0.25
"""After this share of the limit without values, any member creates them."""
LOOK_S = 0.5
"""How often a member that waits for its first values looks whether its generation broke."""


def first_values(
    client: ParameterClient,
    values: SharedValues,
    spec: OptimizerSpec,
    *,
    creates: bool,
    limit_s: float,
    is_broken: Callable[[], bool],
) -> None:
    """Have the job's values in `values`, created from these if nobody else does so in time.

    Who `creates` does so at once. Raises ShardNotReady when the limit has passed, GenerationBroken,
    and what the servers refuse the optimizer with.
    """
    now_s = time.monotonic()
    create_at_s = now_s if creates else now_s + PATIENCE_SHARE * limit_s
    give_up_s = now_s + limit_s
    wait_s = 0.0
    while not _pulled(client, values, wait_s, give_up_s):
        if is_broken():
            raise GenerationBroken("the generation broke before training had its first values")
        wait_s = LOOK_S
        if time.monotonic() >= create_at_s:
            client.create(spec, values.present())


def _pulled(client: ParameterClient, values: SharedValues, wait_s: float, give_up_s: float) -> bool:
    """Whether the values were there and have been taken."""
    try:
        client.pull(values.writable(), wait_s=wait_s)
    except ShardNotReady:
        if time.monotonic() >= give_up_s:
            raise
        return False
    values.adopt()
    return True
