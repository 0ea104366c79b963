"""Variables of the environment by which torch decides what an error of NCCL does to the process.

Images and launchers export some of them (torchrun: TORCH_NCCL_ASYNC_ERROR_HANDLING=1), for jobs
that end with the first error. A member goes on in the next generation.
"""

from collections.abc import Mapping, MutableMapping

import structlog

from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

REQUIRED: Mapping[str, str] = {
    # CleanUpOnly: a collective that failed or ran out of time has its communicator aborted. The
    # others (ErrorHandlingMode in torch's ProcessGroupNCCL.hpp) end the process, or do nothing.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # The monitor ends a process whose watchdog gave no sign for some minutes: one that was stopped
    # or suspended, or whose abort hangs. Heartbeats find these.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # What is written before an abort keeps the trainer waiting for it.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    # A report of all ranks before an abort, through the store; it needs an ending process.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # A device assertion on the first NaN, after which the process cannot use its GPU: one gradient
    # that is not finite, as AMP meets them, would be the end of it.
    "TORCH_NCCL_NAN_CHECK": "0",
}
"""Values that let a member survive an error of NCCL."""
_OLD_NAMES: Mapping[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
"""Names that torch reads as well."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_OFF = ("", "0", "false", "f", "no", "n")


def require_survival(environment: MutableMapping[str, str]) -> None:
    """Set what must be set for groups that are made from here on; warn once of what was replaced.

    Raises InvalidSpec if waits are blocking: each would hold the trainer, and no abort ends it.
    """
    for name in _BLOCKING:
        if environment.get(name, "").strip().lower() not in _OFF:
            raise InvalidSpec(
                f"{name} is set: a wait for NCCL that blocks cannot be ended when a member is lost",
                seen=f"{name}={environment[name]}",
                expected="not set, or 0",
                fix=f"Remove {name} from the environment of the image or the launcher.",
            )
    replaced = [
        f"{name}={environment[name]} (now {required})"
        for name, required in REQUIRED.items()
        if environment.get(name, required) != required
    ]
    for old, name in _OLD_NAMES.items():
        seen = environment.pop(old, None)
        if seen is not None and seen != REQUIRED[name]:
            replaced.append(f"{old}={seen} (removed: {name}={REQUIRED[name]})")
    environment.update(REQUIRED)
    if replaced:
        log.warning(
            "nccl_environment_replaced",
            replaced=", ".join(replaced),
            reason="torch would end a process that is to go on in the next generation, or keep it"
            " waiting",
        )
