"""The first values of a member: pulled from the servers, or created there."""

import threading
import time
from collections.abc import Callable

import structlog

from shoal.strategies.asynchronous.shared_values import SharedValues
from shoal_client.parameters.dense import ParameterClient
from shoal_proto.errors import GenerationBroken, NoServers, ShardNotReady
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec

log = structlog.get_logger(__name__)

PATIENCE_SHARE = 0.25
"""Share of the time limit after which any member creates missing values."""
LOOK_S = 0.5


def await_servers(
    place_shards: Callable[[], object], *, limit_s: float, is_broken: Callable[[], bool]
) -> None:
    """Place the job's shards, as soon as there is a parameter server.

    Raises NoServers after `limit_s`, GenerationBroken, and the errors of placing.
    """
    began_s = time.monotonic()
    waits = False
    pause = threading.Event()
    while True:
        try:
            place_shards()
        except NoServers as error:
            waited_s = time.monotonic() - began_s
            if waited_s >= limit_s:
                raise NoServers(
                    error.what,
                    seen=f"{error.seen}, for {waited_s:.0f} s",
                    expected=error.expected,
                    fix=f"{error.fix} A worker waits for a server for up to --join-s seconds.",
                ) from error
            if not waits:
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + limit_s))
                log.warning(
                    "waiting_for_parameter_servers",
                    reason=str(error),
                    until=until,
                    limit_s=limit_s,
                )
            waits = True
            if is_broken():
                raise GenerationBroken("the generation broke before there was a server") from error
            pause.wait(LOOK_S)
            continue
        if waits:
            log.info("parameter_servers_found", waited_s=round(time.monotonic() - began_s, 1))
        return


def first_values(
    client: ParameterClient,
    values: SharedValues,
    spec: OptimizerSpec,
    *,
    creates: bool,
    limit_s: float,
    is_broken: Callable[[], bool],
) -> None:
    """Pull the job's values into `values`; create them from `values` if no other member does.

    `creates`: create them at once if they are missing. Raises ShardNotReady after `limit_s`,
    GenerationBroken, refusals of the optimizer, and what `pull` raises.
    """
    now_s = time.monotonic()
    create_at_s = now_s if creates else now_s + PATIENCE_SHARE * limit_s
    give_up_s = now_s + limit_s
    wait_s = 0.0
    while not _pull(client, values, wait_s, give_up_s):
        if is_broken():
            raise GenerationBroken("the generation broke before training had its first values")
        wait_s = LOOK_S
        if time.monotonic() >= create_at_s:
            client.create(spec, values.present())


def _pull(client: ParameterClient, values: SharedValues, wait_s: float, give_up_s: float) -> bool:
    """Return False if the values do not exist yet; raise ShardNotReady after `give_up_s`."""
    try:
        client.pull(values.writable(), wait_s=wait_s)
    except ShardNotReady:
        if time.monotonic() >= give_up_s:
            raise
        return False
    values.adopt()
    return True
