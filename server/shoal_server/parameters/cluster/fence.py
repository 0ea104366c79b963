"""Who may still push: members whose incarnation is the one that etcd names."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing

import structlog

from shoal_proto.errors import Fenced, MalformedMessage, RetryError
from shoal_proto.incarnation import public_id
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, KeyValueStore, Revision

log = structlog.get_logger(__name__)


class Fence:
    """Knows the members by a watch; asks etcd for those it does not know.

    While etcd is away, members known as live go on; unknown ones get Unavailable. `on_finished` is
    called with the name of a job that is over, once its last member has gone: nobody can reach its
    shards any more.
    """

    def __init__(
        self, store: KeyValueStore, on_finished: Callable[[str], object] = lambda job: None
    ) -> None:
        self._store = store
        self._on_finished = on_finished
        self._incarnations: dict[str, str] = {}
        self._revisions: dict[str, Revision] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Fence":
        snapshot = await self._store.range(keys.MEMBERS)
        for item in snapshot.items:
            self._put(item.key, item.value, item.mod_revision)
        self._task = asyncio.create_task(self._follow(snapshot.revision))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def check(self, token: Token) -> str:
        """The session of the token's holder: its job, name and the public id of its process.

        Raises Fenced if that incarnation is not a member (any more).
        """
        if not (is_name(token.job) and is_name(token.member_id) and token.incarnation):
            raise MalformedMessage(
                "the token names no member",
                seen=f"job {token.job!r}, member {token.member_id!r},"
                f" {'an' if token.incarnation else 'no'} incarnation",
                expected=f"an incarnation, and names of {NAME_RULE}",
            )
        key = keys.member(token.job, token.member_id)
        if self._incarnations.get(key) != token.incarnation:
            await self._ask(key)
            current = self._incarnations.get(key)
            if current != token.incarnation:
                raise await self._fenced(token, current)
        return f"{key}#{public_id(token.incarnation)}"

    def is_live(self, session: str) -> bool:
        """Whether a session's incarnation is known as not fenced. Any thread."""
        key, _, process = session.partition("#")
        incarnation = self._incarnations.get(key)
        return incarnation is not None and public_id(incarnation) == process

    async def _ask(self, key: str) -> None:
        found = await self._store.get(key)
        if found is None:
            self._forget(key)
        else:
            self._put(key, found.value, found.mod_revision)

    async def _fenced(self, token: Token, current: str | None) -> Fenced:
        state = await self._store.get(keys.job_state(token.job))
        generation = _number(state.value, "last_generation") if state else 0
        return Fenced(
            f"member {token.member_id} of job {token.job} may not change anything any more",
            seen=f"process {public_id(token.incarnation)} of generation {token.generation}",
            expected=f"process {public_id(current)}" if current else "a member that is present",
            fix="Join again to go on.",
            details={"generation": str(generation)},
        )

    async def _follow(self, revision: int) -> None:
        watch = self._store.watch(keys.MEMBERS, Revision(revision + 1))
        async with aclosing(watch) as batches:
            async for batch in batches:
                for event in batch.events:
                    # What was asked for directly may be newer than what the watch has reached.
                    if event.mod_revision < self._revisions.get(event.key, 0):
                        continue
                    if event.kind is EventKind.DELETE:
                        self._forget(event.key)
                        await self._look_for_the_end(event.key)
                    else:
                        self._put(event.key, event.value, event.mod_revision)

    async def _look_for_the_end(self, key: str) -> None:
        job = key.removeprefix(keys.MEMBERS).partition("/")[0]
        if any(known.startswith(keys.members(job)) for known in self._incarnations):
            return
        try:
            state = await self._store.get(keys.job_state(job))
        except RetryError as error:
            log.warning("end_of_job_not_looked_up", job=job, reason=str(error))
            return
        if state is not None and _field(state.value, "finished") is True:
            self._on_finished(job)

    def _put(self, key: str, value: bytes, revision: Revision) -> None:
        incarnation = _text(value, "incarnation")
        if not incarnation:
            log.error("member_record_unreadable", key=key)
            self._forget(key)
            return
        self._incarnations[key] = incarnation
        self._revisions[key] = revision

    def _forget(self, key: str) -> None:
        self._incarnations.pop(key, None)
        self._revisions.pop(key, None)


def _field(value: bytes, name: str) -> object:
    try:
        record = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return record.get(name) if isinstance(record, dict) else None


def _text(value: bytes, name: str) -> str:
    found = _field(value, name)
    return found if isinstance(found, str) else ""


def _number(value: bytes, name: str) -> int:
    found = _field(value, name)
    return found if isinstance(found, int) else 0
