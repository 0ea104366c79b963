"""The process that had this server's id before: it may be cut off, and still serve.

Whoever takes its place waits until that one can acknowledge nothing any more, unless it is known to
have ended: it said so itself, its process is gone from this very machine, or its journal's lock
was free.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from shoal_server.core.shards.assignments import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.json_fields import Fields, Unreadable
from shoal_server.etcd.records import ended_servers

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """Enough of a process to see, on its own machine, whether it has ended."""

    incarnation: str
    boot: str
    """Changes with each start of the machine, and is no other machine's."""
    namespace: str
    """In which the number counts: one of a container is not the machine's."""
    pid: int
    started: str
    """Another process may have the number by now."""

    @classmethod
    def own(cls, incarnation: str) -> "ProcessRecord":
        return cls(
            incarnation=incarnation,
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=str(Path("/proc/self/ns/pid").readlink()),
            pid=os.getpid(),
            started=_started(os.getpid()),
        )

    @classmethod
    def parsed(cls, value: bytes) -> "ProcessRecord":
        """Raises Unreadable."""
        fields = Fields.parsed(value)
        return cls(
            incarnation=fields.text("incarnation"),
            boot=fields.text("boot"),
            namespace=fields.text("namespace"),
            pid=fields.count("pid"),
            started=fields.text("started"),
        )

    def has_ended(self, seen_by: "ProcessRecord") -> bool:
        """Whether a process of the same machine can tell that this one is gone."""
        if (self.boot, self.namespace) != (seen_by.boot, seen_by.namespace):
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> str:
    """When a process began, in ticks of its machine's clock; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name in parentheses may have spaces; 20 fields on is the start.
    return stat.rpartition(")")[2].split()[19]


async def succeed(store: KeyValueStore, me: Holder, *, released: str = "") -> None:
    """Say of the last process of this id that it has ended, where that is known; and leave behind
    what the next one needs to know of this one. `released`: who had the journal's lock before.

    Raises what the store raises.
    """
    own = ProcessRecord.own(me.incarnation)
    key = keys.last_process(me.server_id)
    found = await store.get(key)
    last = _parsed(key, found.value) if found is not None else None
    if last is not None and last.incarnation != me.incarnation:
        if last.has_ended(own) or last.incarnation == released:
            await ended_servers.note(store, Holder(me.server_id, last.incarnation))
        else:
            log.info("predecessor_may_live", server_id=me.server_id)
    await store.put(key, json.dumps(asdict(own)).encode())


def _parsed(key: str, value: bytes) -> ProcessRecord | None:
    try:
        return ProcessRecord.parsed(value)
    except Unreadable as error:
        log.error("process_record_unreadable", key=key, reason=str(error))
        return None
