"""Election of the leading coordinator.

Two guards keep a deposed leader from writing. First, a leader counts its lease from the *sending*
of the last confirmed renewal, so it stops before the lease ends in etcd. Second, each write
compares the revision at which the leader's key was created: etcd refuses it once the key is gone or
another leader's, whatever the clocks say.

etcd may keep a lease longer than asked: it rounds up a TTL, and its own restarts and elections
start each lease's time afresh.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import structlog

from shoal_proto.errors import InvalidSpec, LeaseExpired, RetryError, ShoalError
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    KeyValueStore,
    LeaseId,
    absent,
    created_at,
)
from shoal_server.etcd.leader_key import (
    Leader,
    LeaderCandidate,
    delete_unleased,
    end_term,
    follow,
)
from shoal_server.etcd.repeat import new_pauses, until_answered
from shoal_server.serving.tasks import cancel

log = structlog.get_logger(__name__)

DEFAULT_TTL_S = 5.0
GIVE_UP_WITHIN_S = 2.0
SAFETY = 0.9
"""Fraction of a TTL that a leader relies on; the rest covers a late timer."""


class Leadership:
    """Term of a coordinator, from `Election.campaign`. Renews the lease until the term ends."""

    def __init__(
        self,
        store: KeyValueStore,
        lease: LeaseId,
        leader: Leader,
        *,
        sent_s: float,
        ttl_s: float,
    ) -> None:
        """`sent_s`: time at which the last renewal was sent, which etcd confirmed for `ttl_s`."""
        self.lost = asyncio.Event()
        self.reason = ""
        self.create_revision = leader.create_revision
        self._store = store
        self._lease = lease
        self._clock = asyncio.get_running_loop().time
        self._own_until_s = sent_s + SAFETY * ttl_s
        self._background_renewal = store.renew_in_background(lease, ttl_s)
        self._tasks = (
            asyncio.create_task(self._renew(), name="leader-renew"),
            asyncio.create_task(self._observe(), name="leader-observe"),
        )

    @property
    def condition(self) -> Compare:
        """Condition of every write of the leader."""
        return created_at(keys.LEADER, self.create_revision)

    @property
    def held(self) -> bool:
        """True while the lease cannot have run out and the term is not known to be over."""
        return not self.lost.is_set() and self._clock() < self._valid_until_s

    @property
    def _valid_until_s(self) -> float:
        renewal = self._background_renewal.confirmed
        if renewal is None:
            return self._own_until_s
        return max(self._own_until_s, renewal.sent_s + SAFETY * renewal.ttl_s)

    async def resign(self) -> None:
        """End the term, so that a successor can lead at once. Harmless if it is over already.

        If etcd does not answer within GIVE_UP_WITHIN_S, the lease runs out by itself. Raises etcd's
        refusals, such as AccessDenied, with the term over too.
        """
        await cancel(*self._tasks)
        self._background_renewal.end()
        self._lose("resigned")
        await _revoke(self._store, self._lease)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self._background_renewal.end()
            log.info("leadership_ended", reason=reason, create_revision=self.create_revision)
            self.lost.set()

    async def _renew(self) -> None:
        while not self.lost.is_set():
            self._background_renewal.report_alive()
            until_s = self._valid_until_s
            left_s = until_s - self._clock()
            try:
                async with asyncio.timeout(left_s):
                    await asyncio.sleep(left_s / (3 * SAFETY))
                    if self._valid_until_s <= until_s:
                        await self._renew_once()
            except TimeoutError:
                # The lease may have been renewed in the background.
                if not self.held:
                    self._lose("the lease could not be renewed in time")
            except Exception as error:  # noqa: BLE001 - without renewals the term ends
                self._lose(f"the lease was not renewed: {error}")

    async def _renew_once(self) -> None:
        sent_s = self._clock()

        async def renew() -> float:
            nonlocal sent_s
            sent_s = self._clock()
            return await self._store.keep_alive(self._lease)

        ttl_s = await until_answered(
            renew, lambda error: log.warning("leader_lease_not_renewed", reason=str(error))
        )
        if ttl_s <= 0:
            raise LeaseExpired("etcd has ended the leader's lease")
        self._own_until_s = sent_s + SAFETY * ttl_s

    async def _observe(self) -> None:
        """End the term if its key is deleted or replaced, which renewals do not show."""
        try:
            async with aclosing(follow(self._store, self.create_revision)) as leaders:
                async for leader in leaders:
                    if leader is None or leader.create_revision != self.create_revision:
                        self._lose("the leader's key was deleted, or another process has it")
                        return
        except Exception as error:  # noqa: BLE001 - without the watch the term ends
            self._lose(f"the leader's key cannot be watched: {error}")


class Election:
    def __init__(
        self, store: KeyValueStore, candidate: LeaderCandidate, *, ttl_s: float = DEFAULT_TTL_S
    ) -> None:
        """`ttl_s`: time after which a leader that stops renewing is succeeded. etcd rounds it up to
        whole seconds and its minimum, by default 2. Raises InvalidSpec unless above 0."""
        if not ttl_s > 0:
            raise InvalidSpec("bad lease of the leader", seen=str(ttl_s), expected="above 0")
        self._store = store
        self._candidate = candidate
        self._ttl_s = ttl_s
        self.on_trouble: Callable[[str], None] = lambda reason: None
        """Called with the reason when etcd fails; the call in progress then retries."""
        self.on_leader: Callable[[Leader], None] = lambda leader: None
        """Called with each leader that a campaign finds."""

    async def end_predecessor(self) -> None:
        """End the term of a former process at this candidate's address, if there is one.

        Call it before the first campaign, once the candidate listens at its address: the former
        process is then dead, and its lease need not run out. Retries through outages of etcd.
        """
        async with aclosing(self.leaders()) as leaders:
            leader = await anext(leaders)
        candidate = self._candidate
        if leader is not None and (leader.address, leader.host) == (
            candidate.address,
            candidate.host,
        ):
            ended = await end_term(self._store, leader)
            log.info("predecessor_process_ended", address=candidate.address, ended=ended)

    async def campaign(self) -> Leadership:
        """Wait until the leader's key is free, and take it.

        Retries through outages of etcd, and if the new lease runs out before the write. Raises
        refusals such as AccessDenied, and CorruptError if etcd lost history.
        """
        term: Leadership | None = None
        while term is None:
            term = await until_answered(
                self._campaign_once,
                self._note_interruption,
                lambda error: isinstance(error, RetryError | LeaseExpired),
            )
        return term

    async def _campaign_once(self) -> Leadership | None:
        await self._until_vacant()
        return await self._try()

    def _note_interruption(self, error: ShoalError) -> None:
        # LeaseExpired, as after a suspension of this process, shows that etcd has answered.
        if not isinstance(error, LeaseExpired):
            self.on_trouble(str(error))
        log.warning("campaign_interrupted", reason=str(error))

    async def leaders(self) -> AsyncGenerator[Leader | None, None]:
        """Yield the leader (None: there is none) now and at each change.

        Of changes that arrive together only the last is seen. Retries through outages of etcd;
        raises its refusals.
        """
        leader, is_first, pauses = None, True, new_pauses()
        while True:
            try:
                async with aclosing(follow(self._store)) as found:
                    async for known in found:
                        pauses.reset()
                        if is_first or known != leader:
                            leader, is_first = known, False
                            yield leader
            except RetryError as error:
                self.on_trouble(str(error))
                log.warning("leader_unknown", reason=str(error))
                await asyncio.sleep(pauses.pause_s())

    async def _try(self) -> Leadership | None:
        """Try once to take the leader's key; None if another candidate was faster."""
        clock: Callable[[], float] = asyncio.get_running_loop().time
        lease = await self._store.grant(self._ttl_s)
        try:
            sent_s = clock()
            ttl_s = await self._store.keep_alive(lease)
            put = self._candidate.put(lease)
            result = await self._store.transact((absent(keys.LEADER),), (put,))
        except BaseException:
            # Also if the outcome is unknown: revoking the lease deletes a written key, and makes a
            # late request fail.
            await _revoke(self._store, lease)
            raise
        if not result.succeeded:
            await _revoke(self._store, lease)
            return None
        log.info("leadership_won", address=self._candidate.address, revision=result.revision)
        leader = Leader(
            address=self._candidate.address,
            http_url=self._candidate.http_url,
            host=self._candidate.host,
            create_revision=result.revision,
        )
        return Leadership(self._store, lease, leader, sent_s=sent_s, ttl_s=ttl_s)

    async def _until_vacant(self) -> None:
        async with aclosing(follow(self._store)) as leaders:
            async for leader in leaders:
                if leader is None:
                    return
                self.on_leader(leader)
                await delete_unleased(self._store)


async def _revoke(store: KeyValueStore, lease: LeaseId) -> None:
    try:
        async with asyncio.timeout(GIVE_UP_WITHIN_S):
            await store.revoke(lease)
    except (RetryError, TimeoutError) as error:
        log.warning("lease_not_revoked", lease=lease, reason=repr(error))
