"""Environment variables of NCCL, above all those that decide what an error does to the process.

Images and launchers export some for jobs that end with the first error. A member has to survive the
error.
"""

import re
from collections.abc import Mapping, MutableMapping

import structlog

from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

REQUIRED: Mapping[str, str] = {
    # CleanUpOnly: torch aborts the communicator of a failed collective. Other modes
    # (ErrorHandlingMode in torch's ProcessGroupNCCL.hpp) end the process, or do nothing.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # The monitor ends a process whose watchdog is silent for minutes. Heartbeats detect that here.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A dump would delay the abort.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    # If on, all ranks report through the store before an abort.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # If on, the first NaN makes the GPU unusable. With AMP, NaN gradients are normal.
    "TORCH_NCCL_NAN_CHECK": "0",
    # If on, errors are sent to all ranks. Here the coordinator reports losses.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # If on, a timeout ends the process from torch 2.15 on (pytorch pull request 196187).
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",
}
"""Values with which a member survives an error of NCCL."""
_OLD_NAMES: Mapping[str, str] = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
"""Older names that torch reads too."""
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_NUMBER = re.compile(r"\s*([+-]?[0-9]{1,20})")
"""Matches what C++ reads as a number at the beginning of a text."""
_INT = range(-(1 << 31), 1 << 31)
_OFF = ("0", "false", "f", "no", "n")
_ON = ("1", "true", "t", "yes", "y")
_SWITCHES = (
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_BCAST_UNIQUEID",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_ENABLE_TIMING",
    "TORCH_NCCL_HIGH_PRIORITY",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
    "TORCH_NCCL_TRACE_CPP_STACK",
    "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_USE_COMM_NONBLOCKING",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
    "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)
_NUMBERS = (
    "TORCH_NCCL_COORD_CHECK_MILSEC",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT",
    "TORCH_NCCL_RANKS_PER_ROOT",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
"""Numbers that torch reads. An invalid value would raise an error of NCCL in each generation, which
looks like the loss of a peer."""


def require_survival(environment: MutableMapping[str, str]) -> None:
    """Set the required variables and remove empty ones, for groups that are made after this call.

    Raises InvalidSpec for a value that torch cannot read, and if NCCL's waits are set to block: no
    abort could then end the trainer's wait.
    """
    for name in (*_BLOCKING, *_SWITCHES, *_NUMBERS):
        if not environment.get(name, "empty").strip():
            # Images unset a variable by giving it an empty value.
            del environment[name]
    _check_readable(environment)
    for name in _BLOCKING:
        if environment.get(name, "0").lower() not in _OFF:
            raise InvalidSpec(
                f"{name} is set: blocking waits for NCCL cannot be ended when a member is lost",
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
            reason="torch would end a process that has to continue in the next generation, or keep"
            " it waiting",
        )


def _check_readable(environment: Mapping[str, str]) -> None:
    for name in (*_SWITCHES, *_NUMBERS):
        value = environment.get(name)
        is_switch = name in _SWITCHES
        if value is None or (value.lower() in (*_ON, *_OFF) if is_switch else _is_int(value)):
            continue
        raise InvalidSpec(
            f"torch cannot read {name}",
            seen=f"{name}={value}",
            expected="1 or 0" if is_switch else f"a whole number up to {_INT[-1]}",
            fix=f"Remove {name} from the environment of the image or the launcher.",
        )


def _is_int(value: str) -> bool:
    number = _NUMBER.match(value)
    return number is not None and int(number[1]) in _INT
