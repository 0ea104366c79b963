"""Acceptance of losses: lost shards are given up on an operator's request.

If no trained shard is left, the sample ledger is deleted, so that all samples are trained on again;
the operator may keep the ledger instead. If trained shards are left, the operator has to choose.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from shoal_proto.errors import InvalidSpec, NothingLost, UnknownJob, UnknownShard
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1 import shards_pb2 as pb
from shoal_proto.v1.shards_pb2 import AcceptLossReply, AcceptLossRequest, GivenUpShard
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.losses import SamplesAfterLoss
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments as records
from shoal_server.serving.unix_clock import unix_s

MAX_BY_LENGTH = 200
_SAMPLES = {
    pb.SAMPLES_AFTER_LOSS_UNSAID: None,
    pb.SAMPLES_AFTER_LOSS_ANEW: SamplesAfterLoss.ANEW,
    pb.SAMPLES_AFTER_LOSS_KEEP: SamplesAfterLoss.KEEP,
}
_SAMPLES_NUMBERS = {outcome: number for number, outcome in _SAMPLES.items()}


class LedgerAccess(Protocol):
    """The sample ledgers, for acceptance."""

    def counts(self, job: str) -> Awaitable[LedgerCounts | None]:
        """Counts of the job's ledger; None without one."""

    def closed_ledger(self, job: str) -> AbstractAsyncContextManager[None]:
        """Keep the job's ledger closed, with no write in progress, during the block."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    current: JobAssignments
    stored: dict[int, records.StoredShard]
    chosen: Sequence[ShardAssignment]
    """Shards for the reply."""
    lost: Sequence[ShardAssignment]
    """Shards to give up."""
    samples: SamplesAfterLoss | None

    @property
    def kept_shard_ids(self) -> list[int]:
        kept = losses.still_trained(self.current, {shard.shard_id for shard in self.lost})
        return [shard.shard_id for shard in kept]


class LossAcceptance:
    """Gives up lost shards. `require_leading` raises NotLeader."""

    def __init__(
        self,
        store: LeaderStore,
        loss_log: LossLog,
        samples: LedgerAccess,
        require_leading: Callable[[], None],
    ) -> None:
        self._store = store
        self._losses = loss_log
        self._samples = samples
        self._require_leading = require_leading

    async def accept(self, request: AcceptLossRequest) -> AcceptLossReply:
        """Give up the requested lost shards, all lost ones if none are named.

        The reply lists the requested shards; if none are named, all that were given up, now or
        before. A dry run changes nothing, and lists the shards that it would give up; without any,
        those given up before.

        Raises UnknownJob, UnknownShard, NothingLost, NotLeader, what the store and
        `LedgerAccess.counts` raise, and InvalidSpec for a bad name or a missing choice for the
        samples. If etcd fails between two transactions, some shards are given up already.
        """
        self._require_leading()
        job, by = request.job, request.by[:MAX_BY_LENGTH] or "somebody"
        if not is_name(job):
            raise InvalidSpec("bad name of a job", seen=repr(job[:128]), expected=NAME_RULE)
        choice = _SAMPLES.get(request.samples)
        counts = await self._samples.counts(job)
        now_unix_s = unix_s()
        given_up: list[ShardAssignment] = []
        try:
            while True:
                plan = await self._plan(request, choice)
                if request.dry_run or not plan.lost:
                    break
                if plan.samples is None:
                    raise _samples_not_chosen(plan, counts)
                # All transactions must make the same choice.
                choice = plan.samples
                await self._give_up(plan, by, now_unix_s, given_up)
        finally:
            # Report even after a failure: a repeated request does not find these shards lost.
            if given_up:
                text = _samples_in_words(counts, anew=choice is SamplesAfterLoss.ANEW)
                self._losses.record_acceptance(job, given_up, by, text)
        by_this_call = plan.lost if request.dry_run else given_up
        return _reply(plan, by_this_call, plan.samples if request.dry_run else choice, counts)

    async def _plan(self, request: AcceptLossRequest, choice: SamplesAfterLoss | None) -> _Plan:
        current, stored = await self._read(request.job)
        chosen = _chosen(current, frozenset(request.shard_ids))
        lost = [shard for shard in chosen if shard.content is ShardContent.LOST]
        return _Plan(
            current=current,
            stored=stored,
            chosen=chosen,
            lost=lost,
            samples=losses.samples_after(current, {shard.shard_id for shard in lost}, choice),
        )

    async def _give_up(
        self, plan: _Plan, by: str, now_unix_s: float, given_up: list[ShardAssignment]
    ) -> None:
        """Give up the lost shards, and append each to `given_up` once durable. A lost shard that is
        not appended has another record by now."""
        job, size = plan.current.job, records.SHARDS_A_TRANSACTION
        anew = plan.samples is SamplesAfterLoss.ANEW
        async with AsyncExitStack() as stack:
            if anew:
                await stack.enter_async_context(self._samples.closed_ledger(job))
            for start in range(0, len(plan.lost), size):
                batch = plan.lost[start : start + size]
                targets = [
                    losses.give_up_shard(shard, by, now_unix_s, samples_anew=anew)
                    for shard in batch
                ]
                before = [plan.stored[shard.shard_id] for shard in batch]
                # Every transaction deletes the ledger: after a failure, the job would otherwise
                # train given-up shards only on the remaining samples.
                also = _ledger_deletions(job) if anew else ()
                is_done, _ = await records.change(self._store, before, targets, also)
                given_up += batch if is_done else []

    async def _read(self, job: str) -> tuple[JobAssignments, dict[int, records.StoredShard]]:
        listed = await self._store.range(keys.assignments(job))
        current = records.parse_all(job, listed.items)
        if current is None:
            raise await self._no_shards_error(job)
        prefix = keys.assignments_of_placement(job, current.placement_id)
        stored = [records.parse_shard(i) for i in listed.items if i.key.startswith(prefix)]
        return current, {shard.assignment.shard_id: shard for shard in stored}

    async def _no_shards_error(self, job: str) -> UnknownJob | NothingLost:
        if await self._store.get(keys.job_state(job)) is None:
            return UnknownJob(f"there is no job {job!r}", fix="`shoal status` lists the jobs.")
        return NothingLost(
            f"job {job} has lost no shard",
            seen="no shards on parameter servers",
            expected="a shard that is lost",
        )


def _ledger_deletions(job: str) -> Sequence[Delete]:
    return Delete(keys.sample_ledger(job)), Delete(keys.sample_deltas(job), prefix=True)


def _chosen(current: JobAssignments, wanted: frozenset[int]) -> list[ShardAssignment]:
    """Return the wanted shards; by default all lost ones, or else all given up before. Raises
    UnknownShard, and NothingLost if a wanted shard is neither lost nor given up, or if the job has
    no such shard."""
    missing = wanted - {shard.shard_id for shard in current.shards}
    if missing:
        raise UnknownShard(
            f"there is no shard {min(missing)} in job {current.job}",
            seen=f"shard {min(missing)}",
            expected=f"one of {len(current.shards)} shards",
            fix="`shoal status` shows which are lost.",
        )
    lost = losses.lost(current)
    for shard in current.shards:
        if shard.shard_id in wanted and shard not in lost and shard.accepted_loss is None:
            raise NothingLost(
                f"shard {shard.shard_id} of job {current.job} is not lost",
                seen=shard.content.value,
                expected=losses.shards_in_short(lost) or "a lost shard; this job has none",
            )
    if wanted:
        return [shard for shard in current.shards if shard.shard_id in wanted]
    chosen = lost or [shard for shard in current.shards if shard.accepted_loss is not None]
    if not chosen:
        raise NothingLost(
            f"job {current.job} has lost no shard",
            seen=f"{len(current.shards)} shards, none of them lost",
            expected="a shard that is lost",
            fix=f"`shoal status --job {current.job}` shows its shards.",
        )
    return chosen


def _samples_not_chosen(plan: _Plan, counts: LedgerCounts | None) -> InvalidSpec:
    kept = plan.kept_shard_ids
    return InvalidSpec(
        "accepting this loss needs a choice for the job's samples",
        seen=f"{len(plan.lost)} of {len(plan.current.shards)} shards would be given up, and"
        f" {len(kept)} would not (shard {kept[0]} is one); {_progress(counts)}",
        expected="`--samples keep`, to continue after the samples that were trained on, or"
        " `--samples anew`, to train on all samples once more",
        fix="Choose one: lost shards begin with initial values, and the others keep what they"
        " learned.",
    )


def _progress(counts: LedgerCounts | None) -> str:
    if counts is None:
        return "the job has trained on no samples yet"
    total = counts.dataset_size * counts.num_epochs
    return f"{counts.completed} of {total} samples were trained on"


def _samples_in_words(counts: LedgerCounts | None, *, anew: bool) -> str:
    outcome = SamplesAfterLoss.ANEW if anew else SamplesAfterLoss.KEEP
    return f"the job's samples {outcome.value} ({_progress(counts)})"


def _reply(
    plan: _Plan,
    by_this_call: Iterable[ShardAssignment],
    samples: SamplesAfterLoss | None,
    counts: LedgerCounts | None,
) -> AcceptLossReply:
    now = {shard.shard_id for shard in by_this_call}
    return AcceptLossReply(
        shards=[_given_up_shard(shard, shard.shard_id not in now) for shard in plan.chosen],
        samples=_SAMPLES_NUMBERS[samples],
        completed_samples=counts.completed if counts is not None else 0,
        total_samples=counts.dataset_size * counts.num_epochs if counts is not None else 0,
    )


def _given_up_shard(shard: ShardAssignment, before: bool) -> GivenUpShard:
    accepted = None if shard.content is ShardContent.LOST else shard.accepted_loss
    loss = accepted.loss if accepted is not None else shard.loss
    return GivenUpShard(
        shard_id=shard.shard_id,
        version=loss.version if loss is not None else 0,
        by=accepted.by if accepted is not None else "",
        accepted_unix_s=accepted.accepted_unix_s if accepted is not None else 0.0,
        before=before,
        lost_unix_s=loss.lost_unix_s if loss is not None else 0.0,
        servers=loss.servers if loss is not None else (),
    )
