"""Two releases of Shoal that meet in one job.

Both run the present code. The next release adds a field to every message, to each part of one, and
to every record; the field that it wrote into a job's record must never get lost.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from google.protobuf.message import Message

from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.core.driver.job_write import JobWrite
from shoal_server.etcd.api import Operation, Put

MARK = {"of_the_next_release": {"says": ["more"]}}
UNKNOWN_FIELD = bytes.fromhex("82f403") + b"\x04next"
"""Field 8000 of a message, a string."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Release(Enum):
    NOW = "now"
    NEXT = "next"


def uniform() -> Release:
    """Return the release of a process where all run the same one."""
    return Release.NOW


def mixed(seed: int) -> Callable[[], Release]:
    """Return a function that draws the release of each process."""
    chance = random.Random(f"releases {seed}")
    return lambda: chance.choice(list(Release))


def said(message: AnyMessage, by: Release) -> AnyMessage:
    """Return the message as it arrives when a process of that release sends it."""
    if by is Release.NEXT:
        message = type(message).FromString(message.SerializeToString())
        _say_more(message)
    return type(message).FromString(message.SerializeToString())


def _say_more(message: Message) -> None:
    for field, value in message.ListFields():
        # Rosters are compared by a digest of all their contents.
        if field.message_type is None or isinstance(value, pb.Roster):
            continue
        if field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            _say_more(part)
    message.MergeFromString(UNKNOWN_FIELD)


def written(operations: Sequence[Operation], by: Release) -> Sequence[Operation]:
    """Operations as a coordinator of that release writes them, except jobs' own records."""
    if by is not Release.NEXT:
        return operations
    return [_marked(each) if isinstance(each, Put) else each for each in operations]


def _marked(put: Put) -> Put:
    if put.key.endswith("/state") or not put.value.startswith(b"{"):
        return put
    return replace(put, value=json.dumps({**json.loads(put.value), **MARK}).encode())


class JobsOfRelease(DurableJobs):
    """Writes jobs' own records as a coordinator of that release does."""

    release = Release.NOW

    def _with_more(self, write: JobWrite) -> JobWrite:
        write = super()._with_more(write)
        if write.state is None or self.release is Release.NOW:
            return write
        return replace(write, state=replace(write.state, more={**write.state.more, **MARK}))
