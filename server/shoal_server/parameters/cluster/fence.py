"""The fence: admits only members whose incarnation is recorded in etcd."""

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

import structlog

from shoal_proto.errors import Fenced, MalformedMessage, RetryError
from shoal_proto.incarnation import public_id
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)


class PlacementIds(Protocol):
    """Source of the placement id that a job's members must state. The id changes when the job is
    started over or restored by an operator."""

    def members_placement_id(self, job: str) -> str:
        """The id as known here; empty if the job's shards are not placed."""
        ...

    def refresh(self, job: str, shard_ids: Collection[int]) -> Awaitable[None]:
        """Read the newest id, and the records of these shards, from etcd."""
        ...


class Fence:
    """Watches the members of all jobs, and asks etcd about members that it does not know.

    Without etcd, known members are admitted; other calls get a RetryError. `on_finished` is called
    with a finished job once its last member is gone, unless etcd cannot be reached then.
    """

    def __init__(
        self,
        store: KeyValueStore,
        on_finished: Callable[[str], None] = lambda job: None,
        placement_ids: PlacementIds | None = None,
    ) -> None:
        """`placement_ids`: None accepts tokens of any placement."""
        self._store = store
        self._placement_ids = placement_ids
        self._on_finished = on_finished
        self._incarnations: PrefixMirror[str] = PrefixMirror(
            store, keys.MEMBERS, _incarnation_of, on_delete=self._on_member_gone
        )
        self._tasks = SupervisedTasks()

    async def __aenter__(self) -> "Fence":
        await self._incarnations.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._incarnations.__aexit__(*exc)
        await self._tasks.close()

    async def wait_failed(self) -> None:
        await self._incarnations.wait_failed()

    async def check(self, token: Token) -> str:
        """The session of the token's sender: its job, name and the public id of its process.

        Raises Fenced if etcd does not record the token's incarnation for the member, or if the
        token states a placement from before the job was started over or restored; MalformedMessage
        if the token names no member; and what the store raises.
        """
        if not (is_name(token.job) and is_name(token.member_id) and token.incarnation):
            raise MalformedMessage(
                "the token names no member",
                seen=f"job {token.job!r}, member {token.member_id!r},"
                f" {'an' if token.incarnation else 'no'} incarnation",
                expected=f"an incarnation, and names of {NAME_RULE}",
            )
        key = keys.member(token.job, token.member_id)
        name = key.removeprefix(keys.MEMBERS)
        if self._incarnations.get(name) != token.incarnation:
            current = await self._incarnations.look_up(name)
            if current != token.incarnation:
                raise await self._fenced(token, current)
        await self._check_placement(token)
        return f"{key}#{public_id(token.incarnation)}"

    async def _check_placement(self, token: Token) -> None:
        """Raise Fenced if the token states another placement than the job's. A process that was
        suspended while the job was started over or restored may still count as a member, but its
        gradients are of replaced values."""
        placement_ids = self._placement_ids
        if (
            placement_ids is None
            or not token.run
            or token.run == placement_ids.members_placement_id(token.job)
        ):
            return
        # The record may be newer than the watch.
        await placement_ids.refresh(token.job, ())
        expected = placement_ids.members_placement_id(token.job)
        if expected and token.run != expected:
            raise Fenced(
                f"member {token.member_id} uses a shard map of job {token.job} that was replaced:"
                " the job was started over or restored",
                seen=f"a call with the shard map of run {token.run}",
                expected=f"the shard map of run {expected}",
                fix="Join again to continue.",
                details={"run": expected},
            )

    def is_live(self, session: str) -> bool:
        """True if this server's copy of the records in etcd has the session's process as a member.
        Any thread may call it."""
        key, _, process = session.partition("#")
        incarnation = self._incarnations.get(key.removeprefix(keys.MEMBERS))
        return incarnation is not None and public_id(incarnation) == process

    async def _fenced(self, token: Token, current: str | None) -> Fenced:
        state = await self._store.get(keys.job_state(token.job))
        generation = _number(state.value, "last_generation") if state else 0
        return Fenced(
            f"member {token.member_id} of job {token.job} may not change anything any more",
            seen=f"process {public_id(token.incarnation)} of generation {token.generation}",
            expected=f"process {public_id(current)}" if current else "a member that is present",
            fix="Join again to continue.",
            details={"generation": str(generation)},
        )

    def _on_member_gone(self, name: str, incarnation: str) -> None:
        job = name.partition("/")[0]
        self._tasks.start(self._check_finished(job), name=f"end of job {job}")

    async def _check_finished(self, job: str) -> None:
        if self._has_members(job):
            return
        try:
            state = await self._store.get(keys.job_state(job))
        except RetryError as error:
            log.warning("job_end_not_read", job=job, reason=str(error))
            return
        is_finished = state is not None and _field(state.value, "finished") is True
        if is_finished and not self._has_members(job):
            self._on_finished(job)

    def _has_members(self, job: str) -> bool:
        return any(name.startswith(f"{job}/") for name in self._incarnations.records)


def _incarnation_of(item: MirroredKey) -> str | None:
    incarnation = _text(item.value, "incarnation")
    if not incarnation:
        log.error("member_record_unreadable", key=item.key)
    return incarnation or None


def _field(value: bytes, name: str) -> object:
    try:
        record = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return record.get(name) if isinstance(record, dict) else None


def _text(value: bytes, name: str) -> str:
    field = _field(value, name)
    return field if isinstance(field, str) else ""


def _number(value: bytes, name: str) -> int:
    field = _field(value, name)
    return field if isinstance(field, int) else 0
