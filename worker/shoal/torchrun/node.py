"""Membership of one torchrun agent: it enters generations and detects their end."""

import math
import os
import time
from dataclasses import dataclass, replace

import structlog
import torch
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

from shoal.torch_private.c10d import TCPStore
from shoal.torchrun.config import NodeConfig
from shoal.torchrun.store import AgentStore
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    JobFinished,
    RefusedError,
    RejoinError,
    RetryError,
    ShoalError,
    Unavailable,
)
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import GenerationRecord

log = structlog.get_logger(__name__)

# Agents train nothing themselves: for the coordinator they are always before their first step.
STEP = 0
MIN_JOIN_S = 0.05
LAST_TRY_S = 0.3
WITHDRAW_S = 1.0
"""Time to notify the coordinator that this node gave up."""


@dataclass(frozen=True, kw_only=True)
class NodeRank:
    """Rank and store of this node in a generation that all its nodes have entered."""

    store: AgentStore
    rank: int
    world_size: int
    bootstrap: RendezvousStoreInfo


class Node:
    """Membership of one agent. Any thread may call `leave`; other methods are for the agent's own.

    If the membership has ended, the node joins again, with a new incarnation, when its agent asks
    for the next generation.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._member: Member = config.join.member()
        self._member.spec.last_call_s = config.last_call_timeout_s
        self._membership = self._new_membership()
        self._is_member = False
        self._proposed = False
        self._record = GenerationRecord()
        self._store: AgentStore | None = None
        self._server: TCPStore | None = None
        """Kept after the membership has ended, while workers may run."""
        self._give_up_s = math.inf
        self._finished = False
        self._closed = False
        self._unanswered = False
        self._left = False
        self._leave_acknowledged = False

    @property
    def job(self) -> str:
        return self._config.join.job

    # --- joining and leaving ---

    def attend(self) -> None:
        """Become a member.

        Raises the coordinator's refusal, a RetryError if no coordinator answers, and InvalidSpec if
        `last_call_timeout` is too long for the coordinator's limits.
        """
        membership = self._membership
        left_s = max(self._give_up_s - time.monotonic(), MIN_JOIN_S)
        membership.join(min(self._config.connect_timeout_s, left_s))
        self._is_member = True
        limits = membership.limits
        forming_s = limits.prepare_s + limits.bring_up_s
        if self._config.last_call_timeout_s + forming_s >= limits.join_s:
            self.leave(completed=False, reason="its last call is too long")
            raise InvalidSpec(
                "--rdzv-conf last_call_timeout is too long for this coordinator",
                seen=f"{self._config.last_call_timeout_s:g} s",
                expected=f"less than {limits.join_s - forming_s:g} s",
                fix="Lower it, or start the coordinator with a larger --join-s.",
            )
        log.info("job_joined", job=self.job, member=self._member.member_id)

    def leave(self, *, completed: bool, reason: str) -> bool:
        """End the membership; return True if the coordinator has acknowledged that, or there was
        none.

        Tries for `close_timeout`, less the time for which no coordinator has answered already.
        Later calls return the same.
        """
        if self._left:
            return self._leave_acknowledged
        self._left = True
        self._leave_acknowledged = not self._is_member or self._leave(completed, reason)
        return self._leave_acknowledged

    def _leave(self, completed: bool, reason: str) -> bool:
        membership = self._membership
        timeout_s = max(self._config.close_timeout_s - membership.away_s, LAST_TRY_S)
        if self._unanswered:
            timeout_s = LAST_TRY_S
        has_left = membership.leave(completed=completed, reason=reason, timeout_s=timeout_s)
        return has_left or membership.failure is not None

    def close(self, reason: str) -> None:
        """Close the job to new nodes and new generations; do nothing if it is closed.

        The nodes that train, including this one, continue. Raises a RetryError if no coordinator
        answers for `close_timeout`, and refusals.
        """
        if self.is_closed:
            return
        self._give_up_s = time.monotonic() + self._config.close_timeout_s
        try:
            self._become_member()
            self._membership.end_work(reason, closes=True)
        except JobFinished:
            log.info("job_already_closed", job=self.job)
        self._closed = True

    @property
    def is_closed(self) -> bool:
        """True if the job is over or closed to new generations, or if this node has left it."""
        failure = self._membership.failure
        over = self._closed or self._membership.track.is_closing or isinstance(failure, JobFinished)
        return self._left or over

    # --- the end of this node's work ---

    def finish(self) -> None:
        """Report that this node's workers are done: its end then does not disturb other nodes.

        Raises Unavailable if no coordinator answers for `close_timeout`.
        """
        self._finished = True
        membership, now_s = self._membership, time.monotonic()
        close_s = self._config.close_timeout_s
        membership.give_up_at(now_s + max(close_s - membership.away_s, LAST_TRY_S))
        try:
            membership.end_work("its workers are done", finished=True)
        except RetryError as error:
            if membership.failure is None:
                self._unanswered = True
                raise self._no_coordinator(error) from error
        except (RejoinError, RefusedError) as error:
            log.info("finish_not_needed", job=self.job, reason=str(error))
        else:
            log.info("node_finished", job=self.job, generation=self._number)
        finally:
            membership.give_up_at(math.inf)

    def await_others(self, timeout_s: float) -> None:
        """Wait until each other node has finished or has gone on to a generation without this node.

        Raises DeadlineExceeded after `timeout_s`; Unavailable if no coordinator has answered for
        `close_timeout` before that.
        """
        membership, close_s = self._membership, self._config.close_timeout_s
        give_up_s = time.monotonic() + timeout_s
        if membership.await_others_done(self._number, timeout_s, away_limit_s=close_s):
            return
        if time.monotonic() < give_up_s:
            self._unanswered = True
            raise self._no_coordinator(Unavailable(membership.waiting_for))
        # Callers of torch's stores recognise this error by the word "timeout".
        raise DeadlineExceeded(
            f"timeout after {timeout_s:g} s: the other nodes have not finished",
            seen=membership.waiting_for,
        )

    def _no_coordinator(self, error: ShoalError) -> Unavailable:
        return Unavailable(
            "no coordinator answered before this node stopped waiting",
            seen=error.seen or str(error),
            expected=f"one of {', '.join(self._config.join.coordinators)} to answer",
            fix="This node's workers are done. To wait longer, set a larger --rdzv-conf"
            " close_timeout.",
        )

    # --- generations ---

    def enter(self) -> NodeRank:
        """Leave this node's generation, and enter the next one together with all its nodes.

        Raises JobFinished, MemberDrained, DeadlineExceeded after `join_timeout`, or another refusal
        of the coordinator. After `join_timeout` no generation waits for this node.
        """
        self._give_up_s = time.monotonic() + self._config.join_timeout_s
        while True:
            try:
                self._become_member()
                return self._bring_up(self._agree())
            except (RetryError, RejoinError) as error:
                if time.monotonic() >= self._give_up_s:
                    self._withdraw("its rendezvous took too long")
                    raise self._too_late(error) from error
                log.info("rendezvous_continued", job=self.job, reason=str(error))

    def num_waiting(self) -> int:
        """Return the number of nodes that wait for another rendezvous.

        1 if this generation is over, or if ranks in it were assumed (see `AgentStore`).
        """
        membership = self._membership
        if self.is_closed or self._finished or not self._is_member:
            return 0
        if membership.failure is not None:
            return 1
        if (successor := membership.successor()) is not None:
            joiners = len(_member_ids(successor) - _member_ids(self._record))
            return max(joiners, membership.track.num_waiting) or 1
        made_up = self._store is not None and self._store.made_up
        return int(made_up or membership.is_broken(self._number))

    @property
    def _number(self) -> int:
        return self._record.roster.generation

    def _become_member(self) -> None:
        failure = self._membership.failure
        if failure is not None and not isinstance(failure, (RetryError, RejoinError)):
            raise failure
        if self._finished:
            self._withdraw("it begins anew", completed=True)
        if failure is not None or not self._is_member:
            self._membership.close()
            log.info("rejoining", job=self.job, reason=str(failure or "it had left"))
            self._membership = self._new_membership()
            self._is_member = self._proposed = self._finished = False
            self._record, self._store = GenerationRecord(), None
            self.attend()
        self._membership.give_up_at(self._give_up_s)

    def _withdraw(self, reason: str, *, completed: bool = False) -> None:
        if self._is_member:
            timeout_s = LAST_TRY_S if self._membership.away_s else WITHDRAW_S
            self._membership.leave(completed=completed, reason=reason, timeout_s=timeout_s)
        self._is_member = False

    def _agree(self) -> GenerationRecord:
        if not self._proposed:
            fields = {"strategy": "torchrun", "torch": torch.__version__}
            self._membership.propose(
                fields, synchronous=True, step=STEP, has_state=False, stateless=True
            )
            self._proposed = True
        elif self._number and (successor := self._stop()) is not None:
            return successor
        return self._await()

    def _stop(self) -> GenerationRecord | None:
        """Stop in the current generation. Returns the planned successor; None after a break."""
        membership, number = self._membership, self._number
        if membership.successor() is None and not membership.is_broken(number):
            membership.report_broken("the agent restarts its workers")
            left_s = max(self._give_up_s - time.monotonic(), 0.0)
            limit_s = min(membership.limits.collective_s, left_s)
            if not membership.wait_generation_over(number, limit_s):
                raise DeadlineExceeded(
                    f"generation {number} did not end within {limit_s:g} s of its failure",
                    seen=membership.waiting_for,
                )
        if membership.successor() is not None:
            record = membership.begin_step(STEP)
            if record is not None:
                return record
        membership.settle(STEP, has_state=False)
        return None

    def _await(self) -> GenerationRecord:
        membership = self._membership
        while True:
            left_s = max(self._give_up_s - time.monotonic(), 0.0)
            try:
                return membership.await_generation(above=self._number, timeout_s=left_s)
            except DeadlineExceeded:
                stays_s = self._config.join_timeout_s - membership.away_s
                if membership.failure is not None or not membership.is_standby or stays_s <= 0.0:
                    raise
                # A standby node waits until it is needed, as long as a coordinator answers.
                self._give_up_s = time.monotonic() + stays_s
                membership.give_up_at(self._give_up_s)

    def _too_late(self, error: ShoalError) -> DeadlineExceeded:
        join = self._config.join
        return DeadlineExceeded(
            f"no rendezvous of job {self.job} within {self._config.join_timeout_s:g} s",
            seen=error.seen or str(error),
            expected=f"{join.min_members} to {join.max_members} nodes to join",
            fix="`shoal status` shows the joined members; a larger --rdzv-conf join_timeout"
            " waits longer.",
        )

    def _bring_up(self, record: GenerationRecord) -> NodeRank:
        membership, limits = self._membership, self._membership.limits
        entries = record.roster.entries
        world_size, own_id = len(entries), self._member.member_id
        rank = next(entry.rank for entry in entries if entry.member_id == own_id)
        store = AgentStore(
            membership.coordinators,
            membership.token,
            timeout_s=limits.join_s,
            rank=rank,
            world_size=world_size,
            ending=self,
        )
        self._record, self._store = record, store
        if membership.is_broken(self._number):
            store.abort("it broke before this node entered it")
        store.give_up_s = self._give_up_s
        # The server is bound before its port is published, and new for each generation: no other
        # process can take the port, and no key of an earlier generation is in the store.
        self._server = _new_server() if rank == 0 and shares_store() else None
        bootstrap = RendezvousStoreInfo.build(
            rank,
            store,
            local_addr=self._member.info.address,
            server_port=self._server.port if self._server is not None else None,
        )
        store.barrier("shoal/nodes", world_size)
        store.give_up_s = math.inf
        membership.ready(record)
        log.info("generation_entered", job=self.job, generation=self._number, rank=rank)
        return NodeRank(store=store, rank=rank, world_size=world_size, bootstrap=bootstrap)

    def _new_membership(self) -> MemberSession:
        self._member = replace(self._member, incarnation=new_incarnation())
        return MemberSession(self._member, on_break=self._on_break)

    def _on_break(self, generation: int, reason: str) -> None:
        store = self._store
        if store is not None and generation == self._number:
            store.abort(reason)


def shares_store() -> bool:
    """True if rank 0's agent serves the workers' store; otherwise rank 0 itself does."""
    return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def _new_server() -> TCPStore:
    # "localhost" is only for the store's own connection; it listens on every interface.
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _member_ids(record: GenerationRecord) -> set[str]:
    return {entry.member_id for entry in record.roster.entries}
