"""Workers that push rows of a table to real servers, and record answers and rows they saw."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from history.events import now_s
from history.workers import MAX_MEMBERS, Success

from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_client.parameters.dense import ParameterClient
from shoal_client.parameters.job_shards import JointStep
from shoal_client.parameters.table_rows import Gradients, Rows, Where, route
from shoal_client.parameters.tables import TableClient
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2 import JobSpec, MemberInfo
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_proto.v1.tables_pb2 import TableSpec

TIMEOUT_S = 60.0
ROWS_A_PUSH = 12


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A shard's part of an acknowledged push."""

    session: str
    sequence: int
    version: int
    ids: bytes
    births: bytes
    gradients: bytes
    fates: bytes


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rows of one shard as a client saw them."""

    version: int
    ids: bytes
    births: bytes
    values: bytes


@dataclass
class RowHistory:
    """Acknowledged pushes of all workers of a run, and all rows that they saw, by shard."""

    pushed: dict[Where, list[Pushed]] = field(default_factory=dict)
    found: dict[Where, list[Found]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """Settings that all workers of a run share, and their history."""

    coordinators: Sequence[str]
    job: str
    table: TableSpec
    num_ids: int
    """Number of ids that are pushed: 0 to `num_ids - 1`."""
    parameters: Sequence[ParameterSpec] = ()
    """The job's parameters, beside the table."""
    level: Acknowledgement.ValueType = Acknowledgement.ACKNOWLEDGEMENT_DEFAULT
    history: RowHistory = field(default_factory=RowHistory, repr=False)


class RowClient:
    """A member's client of the table, which records its look-ups and pushes in the history."""

    def __init__(self, work: RowWork, session: str, token: Callable[[], Token]) -> None:
        self._work = work
        self._session = session
        self._parameters = ParameterClient(work.coordinators, token, timeout_s=TIMEOUT_S)
        self._parameters.place(work.parameters, [work.table])
        self._client = TableClient(
            work.coordinators, token, timeout_s=TIMEOUT_S, acknowledgement=work.level
        )
        self._client.fetch_map()

    def look_up(self, ids: Sequence[int]) -> tuple[Mapping[Where, bytes], Mapping[Where, Rows]]:
        """Look up and record rows; return ids and rows by shard."""
        table = self._work.table
        wanted = {
            (table.name, index): own.tobytes()
            for index, own in route(ids, table.num_shards).items()
        }
        found = self._client.look_up(wanted)
        history = self._work.history
        with history.lock:
            for where, rows in found.items():
                seen = Found(
                    version=rows.version,
                    ids=wanted[where],
                    births=rows.births,
                    values=rows.values,
                )
                history.found.setdefault(where, []).append(seen)
        return wanted, found

    def push(self, ids: Sequence[int], rng: np.random.Generator) -> Success:
        """Look up rows, and push random gradients for them."""
        return self.push_rows(self.drawn(ids, rng))

    def drawn(self, ids: Sequence[int], rng: np.random.Generator) -> Mapping[Where, Gradients]:
        """Look up rows, and draw gradients for them."""
        wanted, found = self.look_up(ids)
        dtype, dim = np.dtype(self._work.table.dtype), self._work.table.dim
        return {
            where: Gradients(
                ids=own,
                births=found[where].births,
                gradients=rng.standard_normal((len(own) // 8, dim)).astype(dtype).tobytes(),
                base_version=found[where].version,
                base_epoch=found[where].epoch,
            )
            for where, own in wanted.items()
        }

    def push_rows(self, parts: Mapping[Where, Gradients], step: JointStep | None = None) -> Success:
        """Push gradients, and record the outcome."""
        sent_s = now_s()
        result = self._client.push(parts, step=step)
        history = self._work.history
        with history.lock:
            for where, part in parts.items():
                pushed = Pushed(
                    session=self._session,
                    sequence=result.sequence,
                    version=result.versions[where],
                    ids=bytes(part.ids),
                    births=bytes(part.births),
                    gradients=bytes(part.gradients),
                    fates=result.fates[where],
                )
                history.pushed.setdefault(where, []).append(pushed)
        return Success(sent_s, now_s(), result.retries)

    def close(self) -> None:
        self._client.close()
        self._parameters.close()


class RowMember:
    """A member of the job with a client of the table."""

    def __init__(self, work: RowWork, name: str) -> None:
        incarnation = new_incarnation()
        spec = JobSpec(job=work.job, min_members=1, max_members=MAX_MEMBERS, desired_members=1)
        self._membership = MemberSession(
            Member(
                coordinators=work.coordinators,
                spec=spec,
                member_id=name,
                incarnation=incarnation,
                info=MemberInfo(host="localhost", address="127.0.0.1"),
            )
        )
        self._membership.join(TIMEOUT_S)
        self.client = RowClient(work, f"{name}-{incarnation}", lambda: self._membership.token)

    def close(self) -> None:
        self.client.close()
        self._membership.leave(completed=False, reason="the run is over")


class RowWorker:
    """A worker that pushes without pause, on a thread of its own. `connect` makes its client."""

    def __init__(
        self, work: RowWork, name: str, seed: int, connect: Callable[[], RowMember | RowClient]
    ) -> None:
        self.name = name
        self.successes: list[Success] = []
        self.failures: list[str] = []
        self._work = work
        self._connect = connect
        self._rng = random.Random(f"{seed}-{name}")
        self._gradients = np.random.default_rng(self._rng.getrandbits(32))
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> "RowWorker":
        self._thread.start()
        return self

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the push in progress; raise the error with which the worker failed, if any."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            connection = self._connect()
            client = connection.client if isinstance(connection, RowMember) else connection
            try:
                while not self._stopping.is_set():
                    ids = self._rng.sample(range(self._work.num_ids), ROWS_A_PUSH)
                    self.successes.append(client.push(ids, self._gradients))
            finally:
                connection.close()
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self.failures.append(repr(error))
            self._error = error


__all__ = ["Found", "Pushed", "RowClient", "RowHistory", "RowMember", "RowWork", "RowWorker"]
