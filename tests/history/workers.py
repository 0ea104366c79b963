"""Workers that push to real servers, and journal their pushes and the values they saw."""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from history.events import Answered, Gradients, Journal, Seen, Sent, Verdict, now_s
from history.twin import FIRST_VALUES_SEED, checksum
from history.values import Values

from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient, PushResult
from shoal_proto.errors import NonFiniteGradient, ShoalError
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec, ShardMap

MAX_MEMBERS = 64
READ_PAUSE_S = 0.01
ABSENT_RATE, POISON_RATE = 0.1, 0.02
# One shard for each pair of dtype and group, all of about the same size.
PARAMETERS = [
    ParameterSpec(name="a", shape=[70, 50], dtype="float32"),
    ParameterSpec(name="b", shape=[3333], dtype="float32", group=1),
    ParameterSpec(name="c", shape=[1700], dtype="float64", group=1),
    ParameterSpec(name="d", shape=[1800], dtype="float64"),
]
OPTIMIZERS = {
    "sgd": OptimizerSpec(
        kind="sgd",
        groups=[
            HyperParameters(lr=0.1, momentum=0.9),
            HyperParameters(lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01),
        ],
    ),
    "adam": OptimizerSpec(
        kind="adam",
        groups=[
            HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8),
            HyperParameters(lr=0.1, beta1=0.8, beta2=0.999, eps=1e-8, amsgrad=True),
        ],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Settings that all workers of a run share."""

    coordinators: Sequence[str]
    job: str
    optimizer: OptimizerSpec
    directory: Path
    """Directory of the journals."""
    timeout_s: float = 60.0
    """Timeout of a push, after which its outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Success:
    """An acknowledged push."""

    sent_s: float
    answered_s: float
    retries: int


class Session:
    """A member's incarnation, which ends when it closes or when a push's outcome is unknown."""

    def __init__(self, work: Work, member_id: str, journal: Journal) -> None:
        self._work = work
        self._journal = journal
        incarnation = new_incarnation()
        self.name = f"{member_id}-{incarnation[-8:]}"
        self._membership = MemberSession(
            Member(
                coordinators=work.coordinators,
                spec=JobSpec(
                    job=work.job, min_members=1, max_members=MAX_MEMBERS, desired_members=1
                ),
                member_id=member_id,
                incarnation=incarnation,
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        self._membership.join(work.timeout_s)
        self._client = ParameterClient(
            work.coordinators, lambda: self._membership.token, timeout_s=work.timeout_s
        )
        try:
            self.shard_map = self._client.place(PARAMETERS)
        except BaseException:
            self.close()
            raise
        self._values, self._gradients = Values(self.shard_map), Values(self.shard_map)

    def create(self) -> None:
        """Create the shards unless they exist."""
        self._values.draw(FIRST_VALUES_SEED)
        self._client.create(self._work.optimizer, self._values.buffers())

    def pull(self) -> None:
        self._client.pull(self._values.buffers())
        self._journal.write(self._seen())

    def push(self, gradients: Gradients, sequence: int) -> Success:
        """Push, and journal the answer. Raises ShoalError if the outcome is unknown."""
        self._gradients.draw(gradients.seed)
        sent_s = now_s()
        self._journal.write(
            Sent(session=self.name, sequence=sequence, gradients=gradients, at_s=sent_s)
        )
        result = self._client.push(
            self._gradients.buffers(gradients.absent),
            lr=gradients.lr,
            into=self._values.buffers(),
        )
        answer = self._answered(sequence, Verdict.ACKNOWLEDGED, result)
        self._journal.write(self._seen())
        self._journal.write(answer)
        return Success(sent_s, answer.at_s, result.retries)

    def push_poison(self, sequence: int) -> None:
        """Push gradients with NaN, which every shard has to refuse."""
        gradients = Gradients(seed=0, lr=[1.0, 1.0])
        self._gradients.draw(gradients.seed)
        self._gradients.poison()
        self._journal.write(
            Sent(session=self.name, sequence=sequence, gradients=gradients, at_s=now_s())
        )
        try:
            self._client.push(self._gradients.buffers(), lr=gradients.lr)
        except NonFiniteGradient:
            self._journal.write(self._answered(sequence, Verdict.REFUSED))
        else:
            raise AssertionError("a gradient that is not finite was acknowledged")

    def _answered(
        self, sequence: int, verdict: Verdict, result: PushResult | None = None
    ) -> Answered:
        return Answered(
            session=self.name,
            sequence=sequence,
            verdict=verdict,
            at_s=now_s(),
            versions={} if result is None else dict(result.versions),
        )

    def _seen(self) -> Seen:
        values = {
            shard_id: (version, checksum(self._values.of_shard(shard_id)))
            for shard_id, version in self._client.versions.items()
        }
        return Seen(session=self.name, at_s=now_s(), values=values)

    def hang_up(self) -> None:
        """Close the client from another thread: the push in progress fails with unknown outcome."""
        self._client.close()

    def close(self) -> None:
        self._client.close()
        self._membership.leave(completed=False, reason="the session is over")


class _Thread:
    """A thread that runs one session after the other until it is stopped."""

    def __init__(self, work: Work, name: str) -> None:
        self.work = work
        self.name = name
        self.failures: list[str] = []
        """Errors that ended earlier sessions, or kept one from starting."""
        self.stopping = threading.Event()
        self._journal = Journal(work.directory / f"{name}.jsonl")
        self._session: Session | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def hang_up(self) -> None:
        """End the session in the middle of its current call."""
        session = self._session
        if session is not None:
            session.hang_up()

    def stop(self) -> None:
        """Stop after the call in progress; raise the error with which the thread failed, if any."""
        self.stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def act(self, session: Session) -> None:
        """Act in one session: pushes or pulls, until stopped."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            with self._journal:
                while not self.stopping.is_set():
                    self._serve()
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self._error = error

    def _serve(self) -> None:
        try:
            session = Session(self.work, self.name, self._journal)
        except ShoalError as error:
            # No coordinator or server admits it yet: `join` and `place` have already waited.
            self.failures.append(repr(error))
            return
        self._session = session
        try:
            session.create()
            session.pull()
            self.act(session)
        except ShoalError as error:
            self.failures.append(repr(error))
        finally:
            self._session = None
            session.close()


class Worker(_Thread):
    """A worker that pushes without pause, sometimes a gradient that must be refused."""

    def __init__(self, work: Work, number: int, seed: int) -> None:
        super().__init__(work, f"worker-{number}")
        self.successes: list[Success] = []
        self._rng = random.Random(f"{seed}-{number}")

    def act(self, session: Session) -> None:
        sequence = 0
        while not self.stopping.is_set():
            sequence += 1
            if self._rng.random() < POISON_RATE:
                session.push_poison(sequence)
            else:
                self.successes.append(session.push(self._draw(), sequence))

    def _draw(self) -> Gradients:
        lr = [self._rng.choice([0.1, 0.03]), self._rng.choice([0.1, 0.01])]
        absent = ["b"] if self._rng.random() < ABSENT_RATE else []
        return Gradients(seed=self._rng.getrandbits(32), lr=lr, absent=absent)


class Reader(_Thread):
    """A reader that pulls again and again: values that it has seen must not vanish."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, "reader")

    def act(self, session: Session) -> None:
        while not self.stopping.wait(READ_PAUSE_S):
            session.pull()


def settle(work: Work) -> ShardMap:
    """Push once more, so that the optimizer's state shows in the values, and pull what survived.

    Return the job's shard map.
    """
    with Journal(work.directory / "settle.jsonl") as journal:
        session = Session(work, "settle", journal)
        try:
            session.pull()
            session.push(Gradients(seed=1, lr=[0.5, 0.5]), 1)
            session.pull()
            return session.shard_map
        finally:
            session.close()


__all__ = ["OPTIMIZERS", "PARAMETERS", "Reader", "Session", "Success", "Work", "Worker", "settle"]
