"""A server's part in snapshots: a barrier for each job's pushes, and images of its shards. The
images stay as of the cut while pushes continue and the snapshot is written."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import structlog

from shoal_proto.errors import InternalError, RefusedError, ShoalError, SnapshotFailed
from shoal_proto.v1.parameters_pb2 import PushOutcome
from shoal_server.core.shards.steps import Begun, Shards, StepId
from shoal_server.parameters.cluster.fence import Fence
from shoal_server.parameters.images.image import Stamp
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import is_dense
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.shard.step_scope import TABLES
from shoal_server.parameters.snapshot.barrier import BarrierPhase, SnapshotBarrier

log = structlog.get_logger(__name__)

LOOK_S = 0.002
"""Interval between checks while a barrier drains: threads that apply pushes do not notify it."""
MAX_QUIET_JOBS = 64

_Led = dict[int, tuple[ShardReplica, int]]
"""Shards that this server leads, with their epochs."""


@dataclass
class _JobBarrier:
    placement_id: str = ""
    barrier: SnapshotBarrier = field(default_factory=SnapshotBarrier)
    admits_more: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced by a new event whenever the barrier admits more steps."""
    part_ended: asyncio.Event = field(default_factory=asyncio.Event)
    known: _Led = field(default_factory=dict)
    """Shards whose remembered steps the barrier knows. Replaced by a new dict at each change."""
    led: _Led = field(default_factory=dict)
    """Shards that this server led when it closed the barrier."""
    images: dict[int, ShardImage] = field(default_factory=dict)
    cut_id: str = ""
    limit: asyncio.TimerHandle | None = None

    def wake_waiting(self) -> None:
        admits_more, self.admits_more = self.admits_more, asyncio.Event()
        admits_more.set()

    def set_limit(self, limit: asyncio.TimerHandle | None) -> None:
        if self.limit is not None:
            self.limit.cancel()
        self.limit = limit


class SnapshotBarriers:
    """The barriers of all jobs. Lives on the event loop."""

    def __init__(
        self, catalog: Catalog, fence: Fence, placement_id_of: Callable[[str], str] = lambda job: ""
    ) -> None:
        """`placement_id_of`: returns the placement id of a job; empty while unknown."""
        self._catalog = catalog
        self._fence = fence
        self._placement_id_of = placement_id_of
        self._jobs: dict[str, _JobBarrier] = {}

    @asynccontextmanager
    async def admit_part(
        self, job: str, session: str, sequence: int, shards: Shards = None
    ) -> AsyncIterator["AdmittedPart"]:
        """Admit a part of a step, and run the block. Waits while a cut holds the step back.
        `shards`: all shards that the push touches on any server; None: every dense shard."""
        step = StepId(session, sequence)
        cut = self._of(job)
        while not cut.barrier.may_enter(step):
            await cut.admits_more.wait()
            cut = self._of(job)
        cut.barrier.enter(step, shards)
        try:
            yield AdmittedPart(cut.barrier, step)
        finally:
            cut.barrier.leave(step, _Lacking(self._led(job)))
            cut.part_ended.set()

    async def close(self, job: str, cut_id: str, limit_s: float) -> Begun:
        """Admit no new step, for at most `limit_s`; return the steps that have begun here. Raises
        SnapshotFailed while another cut is in progress, or is being written."""
        self._forget_quiet_jobs()
        led = await self._learn_steps(job)
        cut = self._of(job)
        if cut.images:
            raise SnapshotFailed(
                "another snapshot is being written",
                seen=f"cut {cut.cut_id}",
                fix="Wait for it to end.",
            )
        begun = cut.barrier.close(cut_id)
        cut.led = led
        self._limit(job, cut_id, limit_s)
        return begun

    async def freeze(
        self, job: str, cut_id: str, begun: Begun, wait_s: float, *, take_torn: bool
    ) -> tuple[Sequence[Stamp], Sequence[StepId]]:
        """Admit the steps in `begun`, which have begun on any server; wait up to `wait_s` until
        they are applied here. Then make an image of every shard of which this server is primary.

        Returns the images' stamps, and the steps of which the cut has a part only (torn). Raises
        SnapshotFailed for a step that stayed incomplete unless `take_torn`, or if the server's
        shards or the barrier have changed. Afterwards the barrier is open, unless another cut has
        closed it.
        """
        cut = self._of(job)
        cut.barrier.drain(cut_id, begun)
        cut.set_limit(None)
        cut.wake_waiting()
        try:
            await self._drained(job, cut, wait_s)
            cut.barrier.check(cut_id, BarrierPhase.DRAINING)
            led = self._led(job)
            torn = cut.barrier.give_up_incomplete_steps(_Lacking(led))
            if torn and not take_torn:
                raise _torn(job, torn)
            torn += cut.barrier.half_refused_steps(_Lacking(led))
            self._check_led(job, cut)
            images = await _images(led)
            try:
                # Meanwhile the cut may have been aborted.
                cut.barrier.check(cut_id, BarrierPhase.DRAINING)
                self._check_led(job, cut)
            except SnapshotFailed:
                await asyncio.to_thread(_close, images)
                raise
            cut.cut_id, cut.images = cut_id, {each.shard_id: each for each in images}
            return [each.stamp for each in images], torn
        finally:
            self.open(job, cut_id)

    def _check_led(self, job: str, cut: _JobBarrier) -> None:
        led = self._led_epochs(job)
        if led != cut.led:
            raise SnapshotFailed(
                f"the shards of job {job} on this server changed during the cut",
                seen=f"{len(led)} shards",
                expected=f"the same {len(cut.led)} as when the cut began",
            )

    def drop_unwanted(
        self, job: str, cut_id: str, unwanted: Iterable[Stamp], limit_s: float
    ) -> None:
        """Drop the images with these stamps; abort the cut after `limit_s` unless `images_of_cut`
        is read before."""
        cut = self._of(job)
        not_needed = set(unwanted)
        for image in list(cut.images.values()):
            if image.stamp in not_needed:
                image.close()
                del cut.images[image.shard_id]
        self._limit(job, cut_id, limit_s)

    def images_of_cut(self, job: str, cut_id: str) -> Iterator[ShardImage]:
        """Yield the images; each is dropped when the next one is requested. Raises SnapshotFailed
        if that cut is over."""
        cut = self._of(job)
        if cut.cut_id != cut_id:
            raise SnapshotFailed(f"cut {cut_id} is over", seen=f"cut {cut.cut_id or 'none'}")
        cut.set_limit(None)
        while cut.images:
            image = next(iter(cut.images.values()))
            yield image
            image.close()
            cut.images.pop(image.shard_id, None)

    def open(self, job: str, cut_id: str) -> None:
        """Admit all steps again, if that cut is in progress."""
        cut = self._of(job)
        if cut.barrier.open(cut_id):
            cut.set_limit(None)
            cut.wake_waiting()

    def abort(self, job: str, cut_id: str, reason: str) -> None:
        """Admit all steps again, and drop the cut's images. Does nothing for another cut."""
        self.open(job, cut_id)
        cut = self._of(job)
        if cut.cut_id == cut_id:
            for image in cut.images.values():
                image.close()
            log.info(
                "snapshot_barrier_opened",
                job=job,
                cut=cut_id,
                num_left=len(cut.images),
                reason=reason,
            )
            cut.images, cut.cut_id = {}, ""
            cut.set_limit(None)

    def _limit(self, job: str, cut_id: str, limit_s: float) -> None:
        def expire() -> None:
            log.warning("snapshot_barrier_expired", job=job, cut=cut_id, limit_s=limit_s)
            self.abort(job, cut_id, "the coordinator did not continue the cut in time")

        loop = asyncio.get_running_loop()
        self._of(job).set_limit(loop.call_later(limit_s, expire))

    async def _drained(self, job: str, cut: _JobBarrier, wait_s: float) -> None:
        give_up_s = time.monotonic() + wait_s
        while (
            cut.barrier.waits_for(_Lacking(self._led(job)), self._is_live)
            and (left_s := give_up_s - time.monotonic()) > 0
        ):
            cut.part_ended.clear()
            try:
                async with asyncio.timeout(min(left_s, LOOK_S)):
                    await cut.part_ended.wait()
            except TimeoutError:
                continue

    async def _learn_steps(self, job: str) -> _Led:
        """Add to the barrier the steps remembered by shards of which this server has become
        primary, or whose epoch has changed; return all shards that it leads.

        Yields to the event loop after each shard, as a shard remembers up to thousands of pushes.
        If this call is cancelled, the next one continues after the last shard that was added.
        """
        while True:
            self._forget_earlier_placement(job)
            cut, led, added = self._of(job), self._led_epochs(job), set[StepId]()
            unknown = {n: each for n, each in led.items() if cut.known.get(n) != each}
            if not unknown:
                cut.known = led
                return led
            for shard_id, (replica, epoch) in unknown.items():
                found = _begun_in(replica, added)
                cut.barrier.add_steps(found)
                added.update(found)
                known = cut.known = {**cut.known, shard_id: (replica, epoch)}
                await asyncio.sleep(0)
                if self._of(job).known is not known:
                    # Another call has changed the barrier or replaced it.
                    break

    def _led_epochs(self, job: str) -> _Led:
        return {replica.shard_id: (replica, replica.epoch) for replica in self._led(job)}

    def _led(self, job: str) -> list[ShardReplica]:
        return [
            replica for replica in self._catalog.of_job(job) if replica.role is ReplicaRole.PRIMARY
        ]

    def _is_live(self, session: str) -> bool:
        return self._fence.is_live(session.removeprefix(TABLES))

    def _of(self, job: str) -> _JobBarrier:
        cut = self._jobs.get(job)
        if cut is None:
            cut = self._jobs[job] = _JobBarrier(self._placement_id_of(job))
        return cut

    def _forget_earlier_placement(self, job: str) -> None:
        """Forget the steps of an earlier placement: no cut waits for them. Steps with a part in
        progress stay known, as they may be of the new placement."""
        cut, placement_id = self._of(job), self._placement_id_of(job)
        is_idle = cut.barrier.phase is BarrierPhase.OPEN and not cut.images
        if cut.placement_id and cut.placement_id != placement_id and is_idle:
            cut.barrier.forget_ended_steps()
            # Add the shards' steps again: some that were just forgotten may be of the new
            # placement.
            cut.placement_id, cut.known = placement_id, {}
        elif not cut.placement_id:
            cut.placement_id = placement_id

    def _forget_quiet_jobs(self) -> None:
        """Drop the barriers of jobs without live sessions or images: shards remember the steps."""
        if len(self._jobs) <= MAX_QUIET_JOBS:
            return
        for job, cut in list(self._jobs.items()):
            if cut.barrier.is_quiet(self._is_live) and not cut.images:
                del self._jobs[job]


class AdmittedPart:
    """An admitted part of a step."""

    def __init__(self, barrier: SnapshotBarrier, step: StepId) -> None:
        self._barrier = barrier
        self._step = step

    def record_answers(self, outcomes: Iterable[PushOutcome]) -> Sequence[PushOutcome]:
        """Note the answers of shards, and return them. No cut waits for a part that was refused for
        good."""
        answers = list(outcomes)
        for outcome in answers:
            if outcome.HasField("error"):
                kind = ShoalError.kinds.get(outcome.error.kind, InternalError)
                if issubclass(kind, RefusedError):
                    self._barrier.refuse(self._step, outcome.shard_id)
            else:
                self._barrier.note_applied(self._step)
        return answers


class _Lacking:
    """Finds the shards that have not applied a step. Takes none of their locks."""

    def __init__(self, led: Sequence[ShardReplica]) -> None:
        self._led = led

    def __call__(self, step: StepId, shards: Shards) -> Sequence[int]:
        session = step.session.removeprefix(TABLES)
        return [
            replica.shard_id
            for replica in self._led
            if (is_dense(replica.state) if shards is None else replica.shard_id in shards)
            and not replica.state.sessions.has_applied(session, step.sequence)
        ]


async def _images(led: Sequence[ShardReplica]) -> list[ShardImage]:
    """Make images in a thread, as each waits for a push in progress."""

    def make() -> list[ShardImage]:
        with ExitStack() as stack:
            images = [stack.enter_context(each.image()) for each in led]
            stack.pop_all()
        return images

    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda done: _close(done.result()))
        raise


def _close(images: Sequence[ShardImage]) -> None:
    for each in images:
        each.close()


def _begun_in(replica: ShardReplica, scoped: Collection[StepId]) -> Begun:
    """Return the steps that a shard remembers. Leaves out steps in `scoped`: other shards, which
    remember the same scope, have returned them."""
    of_parameters = is_dense(replica.state)
    alone = None if of_parameters else frozenset({replica.shard_id})
    begun = {}
    for session, sequence, scope in replica.state.sessions.remembered():
        if scope is None:
            begun[StepId(session if of_parameters else TABLES + session, sequence)] = alone
        elif (step := scope.step(session, sequence)) not in scoped:
            begun[step] = scope.shards
    return begun


def _torn(job: str, torn: Sequence[StepId]) -> SnapshotFailed:
    named = ", ".join(f"push {step.sequence} of {step.session}" for step in torn[:3])
    return SnapshotFailed(
        f"some pushes of job {job} did not end in time",
        seen=f"{len(torn)} with a missing part: {named}",
        expected="pushes that reach all shards of their step",
        fix="Take another snapshot.",
    )
