"""World of the fault tests: an etcd of three, the members of a job, and checks of agreement."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import pytest
from support.clusters.coordinator_processes import Replicas
from support.clusters.coordinator_world import FIELDS
from support.clusters.etcd_fixture import ask_etcd
from support.members.scripted_member import MemberProcess, Script, ScriptedMember
from support.network import http
from support.processes.ranks import Ranks
from support.processes.served_process import awaited

from shoal_client.local.etcd import RunningEtcd, start_members
from shoal_client.local.process import Supervisor
from shoal_proto.errors import Fenced
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

CALL_S = 30.0


class Etcd:
    """An etcd cluster whose members a test may kill or halt; `restore` brings all back."""

    def __init__(self, supervisor: Supervisor, members: Sequence[RunningEtcd]) -> None:
        self._supervisor = supervisor
        self.members = list(members)

    @property
    def endpoints(self) -> list[str]:
        return [each.endpoint for each in self.members]

    def signal_all(self, number: int) -> None:
        for each in self.members:
            each.process.send_signal(number)

    def leader(self) -> RunningEtcd:
        """Wait for a leader of etcd, and return it."""

        def look() -> RunningEtcd | None:
            for each in self.members:
                status = ask_etcd(each.endpoint, "maintenance/status")
                if status.get("leader") == status["header"]["member_id"]:
                    return each
            return None

        return awaited(look, CALL_S, "etcd has a leader")

    def restore(self) -> None:
        """Continue halted members, restart ended ones."""
        self.signal_all(signal.SIGCONT)
        ended = [i for i, each in enumerate(self.members) if each.process.exit_code is not None]
        started = start_members(self._supervisor.spawn, [self.members[i].member for i in ended])
        for i, each in zip(ended, started, strict=True):
            self.members[i] = each


def is_outcome(outcome: pb.GenerationRecord, shown: Any) -> bool:
    """True if the HTTP API shows the outcome that a member received. The digest is the roster's."""
    verdict = "aborted" if outcome.verdict == pb.VERDICT_ABORTED else "committed"
    same = {"verdict": verdict, "digest": outcome.digest, "reason": outcome.reason}
    return all(shown[name] == value for name, value in same.items())


@dataclass
class Cast:
    """The members of one job; all end with its `with` block."""

    job: str
    replicas: Replicas
    ranks: Ranks
    members: list[ScriptedMember] = field(default_factory=list)
    processes: list[MemberProcess] = field(default_factory=list)

    def joins(
        self, name: str, *withholds: str, at: Sequence[str] = (), **options: Any
    ) -> ScriptedMember:
        """Start a member in this process. `at`: addresses by which it reaches the coordinators."""
        script = self._script(name, *withholds, **options)
        member = ScriptedMember(at or self.replicas.addresses, script)
        self.members.append(member)
        return member.start()

    def process(self, name: str, *withholds: str, **options: Any) -> MemberProcess:
        """Start a member in a separate process."""
        script = self._script(name, *withholds, **options)
        self.processes.append(MemberProcess(self.ranks, self.replicas.addresses, script))
        return self.processes[-1]

    def training(self, *names: str, **options: Any) -> list[ScriptedMember]:
        """Start members, and wait until they train together."""
        members = [self.joins(name, desired=len(names), **options) for name in names]
        for member in members:
            member.await_training_with(*names)
        return members

    def __getitem__(self, name: str) -> ScriptedMember:
        return next(member for member in reversed(self.members) if member.name == name)

    def _script(self, name: str, *withholds: str, **options: Any) -> Script:
        return Script(job=self.job, member_id=name, withholds=frozenset(withholds), **options)

    def record(self, generation: int = 0) -> Any:
        """Return the durable record of a generation (0: the newest), as the leader shows it."""
        path = f"/generations/{generation}" if generation else "/generations"
        found = awaited(lambda: self._shown(path), CALL_S, f"{self.job} has {generation or 'one'}")
        return found if generation else found[0]

    def transcripts(self) -> str:
        """List what the members have received, for the reader of a failure."""
        return "\n".join(
            f"  {member.name}: {member.transcript()}; failure: {member.failure}"
            for member in self.members
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add what the members have received to a failure within the block."""
        try:
            yield
        except Exception as error:
            raise AssertionError(f"{error}\nthe members received:\n{self.transcripts()}") from error

    def await_running(self, generation: int) -> None:
        """Wait until the leader reports that the job runs, and knows that generation."""
        awaited(lambda: self._runs(generation), CALL_S, f"{self.job} runs in {generation}")

    def await_loss_of(self, member_id: str) -> None:
        """Wait until the leader no longer counts a member as one of the job."""
        awaited(lambda: self._has_lost(member_id), CALL_S, f"{self.job} has lost {member_id}")

    def _runs(self, generation: int) -> bool | None:
        detail = self._shown()
        if detail is None:
            return None
        # The number is the newest that was used, perhaps by a failed attempt.
        summary = detail["summary"]
        return (summary["phase"] == "running" and summary["generation"] >= generation) or None

    def _has_lost(self, member_id: str) -> bool | None:
        detail = self._shown()
        if detail is None:
            return None
        return all(each["member"]["member_id"] != member_id for each in detail["members"]) or None

    def _shown(self, path: str = "") -> Any:
        """Return what the leader shows of the job; None while there is no leader."""
        try:
            answer = http.get(f"{self.replicas.leader().http}/api/v1/jobs/{self.job}{path}")
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == httpx.codes.OK else None

    def check_fenced(self, token: Token) -> None:
        """Fail unless every call with the token is refused, and changes nothing."""
        before = self.record()
        generation, digest = before["generation"], before["digest"]
        calls = {
            "Propose": pb.ProposeRequest(token=token, proposal=pb.Proposal(fields=FIELDS)),
            "Answer": pb.AnswerRequest(token=token, generation=generation, digest=digest),
            "Offer": pb.OfferRequest(token=token, generation=generation, next_step=9),
            "Ready": pb.ReadyRequest(token=token),
            "Settle": pb.SettleRequest(token=token, step=9, has_state=True),
            "ReportBroken": pb.ReportBrokenRequest(token=token, error="late"),
            "Leave": pb.LeaveRequest(token=token, completed=True, reason="late"),
        }
        for act, request in calls.items():
            with pytest.raises(Fenced):
                self.members[0].call(act, request)
        beat = pb.HeartbeatRequest(beats=[pb.Beat(token=token)])
        (reply,) = self.members[0].call("Heartbeat", beat).replies
        assert reply.error.kind == Fenced.__name__
        assert self.record() == before

    def check_agreement(self) -> None:
        """Fail unless all members received the same outcomes, equal to the durable ones.

        Each generation number has one roster. If it was committed and then aborted, the abort
        lasts. No member receives an older generation after a newer one.
        """
        rosters: dict[int, set[str]] = {}
        for member in self.members:
            outcomes = member.outcomes()
            numbers = [record.roster.generation for record in outcomes]
            assert numbers == sorted(numbers), f"{member.name} went back: {numbers}"
            for record in outcomes:
                rosters.setdefault(record.roster.generation, set()).add(record.digest)
            for number, final in {r.roster.generation: r for r in outcomes}.items():
                durable = self.record(number)
                assert durable["digest"] == final.digest
                aborted_since = durable["verdict"] == "aborted"
                is_same = is_outcome(final, durable)
                assert is_same or (aborted_since and member.failure is not None), (
                    f"{member.name} holds another record of {number} than etcd"
                )
        for process in self.processes:
            for record in process.outcomes():
                rosters.setdefault(record.roster.generation, set()).add(record.digest)
        several = {number: digests for number, digests in rosters.items() if len(digests) > 1}
        assert not several, f"more than one roster of a generation: {several}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.close()


__all__ = ["Cast", "Etcd", "is_outcome"]
