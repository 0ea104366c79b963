"""Releases of Shoal that meet in one job: what one of them says that another one does not know.

All run the code of now. An earlier one says less: it writes no progress and no tally into a job's
record, and its members are shown every roster whole. The next one says more, in every message, in
each part of one, and in every record; what it wrote into a job's record is there for good.
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
    EARLIER = "earlier"
    NOW = "now"
    NEXT = "next"


def uniform() -> Release:
    """Of one process, where all are of one release."""
    return Release.NOW


def mixed(seed: int) -> Callable[[], Release]:
    """Of one process after the other."""
    chance = random.Random(f"releases {seed}")
    return lambda: chance.choice(list(Release))


def said(message: AnyMessage, by: Release) -> AnyMessage:
    """The message as it arrives from a process of that release."""
    if by is Release.NEXT:
        message = type(message).FromString(message.SerializeToString())
        _say_more(message)
    return type(message).FromString(message.SerializeToString())


def _say_more(message: Message) -> None:
    for field, value in message.ListFields():
        # Rosters are compared by the digest of all that they say.
        if field.message_type is None or isinstance(value, pb.Roster):
            continue
        if field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            _say_more(part)
    message.MergeFromString(UNKNOWN_FIELD)


def written(operations: Sequence[Operation], by: Release) -> Sequence[Operation]:
    """What a coordinator of that release writes, but for jobs' own records."""
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
        if self.release is Release.EARLIER:
            return replace(write, state=replace(write.state, progress=None, tally=None))
        return replace(write, state=replace(write.state, more={**write.state.more, **MARK}))
