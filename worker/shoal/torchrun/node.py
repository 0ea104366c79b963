"""One torchrun agent as a member of a job: enters generations, sees when one is over."""

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
    RejoinError,
    RetryError,
    ShoalError,
)
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import GenerationRecord

log = structlog.get_logger(__name__)

# Agents train nothing themselves: to the coordinator they always stand before their first step.
STEP = 0


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """This node's place in a generation that all its nodes have entered."""

    store: AgentStore
    rank: int
    world_size: int
    bootstrap: RendezvousStoreInfo


class Node:
    """All methods are the agent's; only `_on_break` runs on the membership's thread.

    A node that the coordinator gave up (it was silent for too long, or no generation formed in
    time) joins again with a new incarnation when its agent asks for the next generation.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._member: Member = config.join.member()
        self._member.spec.last_call_s = config.last_call_timeout_s
        self._membership = self._new_membership()
        self._proposed = False
        self._record = GenerationRecord()
        self._store: AgentStore | None = None
        self._server: TCPStore | None = None
        self._left = False

    @property
    def job(self) -> str:
        return self._config.join.job

    # --- joining and leaving ---

    def attend(self) -> None:
        """Become a member. Raises what the coordinator refuses with, or that none answers."""
        membership = self._membership
        membership.join(self._config.connect_timeout_s)
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
        """End the membership; return whether the coordinator knows. The first call counts."""
        if self._left:
            return True
        self._left = True
        known = self._membership.failure is not None
        timeout_s = self._config.close_timeout_s
        told = self._membership.leave(completed=completed, reason=reason, timeout_s=timeout_s)
        self._server = None
        return known or told

    @property
    def is_closed(self) -> bool:
        """Whether the job is over, or this node has left it."""
        return self._left or isinstance(self._membership.failure, JobFinished)

    # --- generations ---

    def enter(self) -> NodePlace:
        """Leave the generation this node is in, and enter the next with all its nodes.

        Raises JobFinished, DeadlineExceeded, or what the coordinator refuses this node with.
        """
        give_up_s = time.monotonic() + self._config.join_timeout_s
        while True:
            try:
                return self._bring_up(self._agree(give_up_s))
            except (RetryError, RejoinError) as error:
                if time.monotonic() >= give_up_s:
                    raise
                log.info("rendezvous_goes_on", job=self.job, reason=str(error))

    def num_waiting(self) -> int:
        """How many nodes would come in by another rendezvous; 1 if this generation is over.

        Above 0 the agent stops its workers and enters the next generation.
        """
        membership = self._membership
        if self.is_closed:
            return 0
        if membership.failure is not None:
            return 1
        if (successor := membership.successor()) is not None:
            return len(_member_ids(successor) - _member_ids(self._record)) or 1
        made_up = self._store is not None and self._store.made_up
        return int(made_up or membership.is_broken(self._number))

    @property
    def _number(self) -> int:
        """The generation this node is in, or was in last."""
        return self._record.roster.generation

    def _agree(self, give_up_s: float) -> GenerationRecord:
        """The record of the next generation, with this node standing still for it."""
        if self._membership.failure is not None:
            self._rejoin(self._membership.failure)
        if not self._proposed:
            fields = {"strategy": "torchrun", "torch": torch.__version__}
            self._membership.propose(
                fields, synchronous=True, step=STEP, has_state=False, stateless=True
            )
            self._proposed = True
        elif self._number and (successor := self._stop()) is not None:
            return successor
        return self._await(give_up_s)

    def _rejoin(self, failure: ShoalError) -> None:
        if not isinstance(failure, (RetryError, RejoinError)):
            raise failure
        self._membership.close()
        log.info("joining_again", job=self.job, reason=str(failure))
        self._membership, self._proposed = self._new_membership(), False
        self._record, self._store = GenerationRecord(), None
        self.attend()

    def _stop(self) -> GenerationRecord | None:
        """Stand still after the present generation; its planned successor, if it has one."""
        membership, number = self._membership, self._number
        if membership.successor() is None and not membership.is_broken(number):
            membership.report_broken("the agent restarts its workers")
            limit_s = membership.limits.collective_s
            if not membership.wait_over(number, limit_s):
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

    def _await(self, give_up_s: float) -> GenerationRecord:
        membership = self._membership
        while True:
            left_s = max(give_up_s - time.monotonic(), 0.0)
            try:
                return membership.await_generation(above=self._number, timeout_s=left_s)
            except DeadlineExceeded as error:
                if membership.failure is not None:
                    raise
                if not membership.stands_by:
                    raise self._too_late(error) from error
                # A spare node waits until it is needed.
                give_up_s = time.monotonic() + self._config.join_timeout_s

    def _too_late(self, error: DeadlineExceeded) -> DeadlineExceeded:
        join = self._config.join
        return DeadlineExceeded(
            f"no rendezvous of job {self.job} within {self._config.join_timeout_s:g} s",
            seen=error.seen,
            expected=f"{join.min_members} to {join.max_members} nodes to come",
            fix="`shoal status` shows who joined; --rdzv-conf join_timeout waits longer.",
        )

    def _bring_up(self, record: GenerationRecord) -> NodePlace:
        """Meet all nodes of an agreed generation, and learn where its workers' store is."""
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
        )
        self._record, self._store = record, store
        if membership.is_broken(self._number):
            store.abort("it broke before this node entered it")
        # Bound before its port is told to anybody, and new for each generation: no other process
        # can take the port, and no key of an earlier generation is in it.
        self._server = _new_server() if rank == 0 else None
        bootstrap = RendezvousStoreInfo.build(
            rank,
            store,
            local_addr=self._member.info.address,
            server_port=self._server.port if self._server is not None else None,
        )
        store.barrier("shoal/nodes", world_size)
        membership.ready(record)
        log.info("generation_entered", job=self.job, generation=self._number, rank=rank)
        return NodePlace(store=store, rank=rank, world_size=world_size, bootstrap=bootstrap)

    def _new_membership(self) -> MemberSession:
        self._member = replace(self._member, incarnation=new_incarnation())
        return MemberSession(self._member, on_break=self._on_break)

    def _on_break(self, generation: int, reason: str) -> None:
        store = self._store
        if store is not None and generation == self._number:
            store.abort(reason)


def _new_server() -> TCPStore:
    # "localhost" is only for its own connection; it listens on every interface.
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _member_ids(record: GenerationRecord) -> set[str]:
    return {entry.member_id for entry in record.roster.entries}
