"""The previous process with this server's id, which may be cut off from etcd and still serve.

A new process takes over the shards once the previous process can no longer acknowledge pushes. It
need not wait if the previous process recorded its end in etcd, is gone from this machine, or has
released the journal's lock.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from shoal_server.core.processes import Holder
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.etcd.records import ended_servers

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """Description of a process, by which another process on its machine can see if it has ended."""

    incarnation: str
    boot: str
    """Id of the machine's boot, different at each start and on each machine."""
    namespace: str
    """PID namespace: a container's PIDs are not the machine's."""
    pid: int
    started: str
    """Start time, which differs for a later process with the same PID."""

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
        """Raises UnreadableRecord."""
        fields = Fields.parsed(value)
        return cls(
            incarnation=fields.text("incarnation"),
            boot=fields.text("boot"),
            namespace=fields.text("namespace"),
            pid=fields.count("pid"),
            started=fields.text("started"),
        )

    def has_ended(self, seen_by: "ProcessRecord") -> bool:
        """True if the process has ended; False if `seen_by` is of another machine or PID
        namespace."""
        if (self.boot, self.namespace) != (seen_by.boot, seen_by.namespace):
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> str:
    """Start time in clock ticks; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name in parentheses may have spaces; the start time is the 20th field after it.
    return stat.rpartition(")")[2].split()[19]


async def succeed(store: KeyValueStore, me: Holder, *, released: str = "") -> None:
    """Record the end of the previous process in etcd, if it is known to have ended; then replace
    its record by that of this process.

    `released`: the incarnation that has released the journal's lock.
    """
    own = ProcessRecord.own(me.incarnation)
    key = keys.last_process(me.server_id)
    stored = await store.get(key)
    last = _parsed(key, stored.value) if stored is not None else None
    if last is not None and last.incarnation != me.incarnation:
        if last.has_ended(own) or last.incarnation == released:
            await ended_servers.note(store, Holder(me.server_id, last.incarnation))
        else:
            log.info("predecessor_may_be_alive", server_id=me.server_id)
    await store.put(key, json.dumps(asdict(own)).encode())


def _parsed(key: str, value: bytes) -> ProcessRecord | None:
    try:
        return ProcessRecord.parsed(value)
    except UnreadableRecord as error:
        log.error("process_record_unreadable", key=key, reason=str(error))
        return None
