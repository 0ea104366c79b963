"""Errors that Shoal raises, sorted by what the caller should do about them.

An error is data: what happened, what was seen, what was expected, how to fix it. The same class
is raised on both sides of a call; `shoal_proto.status` carries it over.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class ShoalError(Exception):
    """The root. `str()` gives one sentence made of the parts; use the attributes in code."""

    kinds: ClassVar[dict[str, type["ShoalError"]]] = {}

    def __init__(
        self,
        what: str,
        *,
        seen: str = "",
        expected: str = "",
        fix: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        self.what = what
        self.seen = seen
        self.expected = expected
        self.fix = fix
        self.details = dict(details or {})
        super().__init__(self._sentence())

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        ShoalError.kinds[cls.__name__] = cls

    def __reduce__(self) -> tuple[object, ...]:
        parts = {"seen": self.seen, "expected": self.expected, "fix": self.fix}
        return (_rebuild, (type(self), self.what, parts, self.details))

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON can carry it to another member."""
        parts = {key: getattr(self, key) for key in ("what", "seen", "expected", "fix", "details")}
        return {"kind": type(self).__name__, **parts}

    @staticmethod
    def from_dict(parts: Mapping[str, Any]) -> "ShoalError":
        """The error that gave `to_dict`; an InternalError for a kind that is not known here."""
        kind = ShoalError.kinds.get(parts["kind"], InternalError)
        return kind(**{key: value for key, value in parts.items() if key != "kind"})

    def _sentence(self) -> str:
        parts = [self.what]
        if self.seen:
            parts.append(f"saw {self.seen}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        text = "; ".join(parts)
        return f"{text}. {self.fix}" if self.fix else text


def _rebuild(
    kind: type[ShoalError], what: str, parts: dict[str, str], details: dict[str, str]
) -> ShoalError:
    return kind(what, **parts, details=details)


class RetryError(ShoalError):
    """The request is valid: the same call may succeed a little later."""


class Unavailable(RetryError):
    """The peer cannot be reached, or is not serving yet."""


class NotLeader(RetryError):
    """The coordinator replica does not lead. `details["leader"]` is the address of the leader."""


class DeadlineExceeded(RetryError):
    """The time limit passed without an answer. The call may or may not have taken effect."""


class ShardNotReady(RetryError):
    """The shard exists in the map but has no values yet."""


class WrongEpoch(RetryError):
    """The sender's view of the shard map is out of date: fetch the map, then retry."""


class Overloaded(RetryError):
    """A bounded queue or table is full."""


class DiskFull(Overloaded):
    """The disk of a server's journal has no room. Pushes that are to be durable are retried until
    there is some, however long that takes."""


class CheckpointFailed(RetryError):
    """A checkpoint could not be written; training is as it was. `details` holds path, rank, errno.

    The next one may succeed, once there is room or permission.
    """


class LoadingFailed(RetryError):
    """Samples could not be loaded: storage failed, or a process that loads them has ended.
    `details["index"]` names the sample, where it is one."""


class SnapshotFailed(RetryError):
    """The snapshot was not taken. Parameters are unchanged, and storage has no part of it."""


class RejoinError(ShoalError):
    """The caller's view of the membership is over: join again to go on."""


class Fenced(RejoinError):
    """The token is stale. `details["generation"]` is the generation that is current."""


class GenerationBroken(RejoinError):
    """A member of the generation was lost; the survivors are agreeing on the next one."""


class LeaseExpired(RejoinError):
    """The lease that the key was to live under has run out."""


class RefusedError(ShoalError):
    """The caller's fault: the same request will be refused again."""


class AccessDenied(RefusedError):
    """The credentials are missing or wrong, or do not permit the request."""


class CertificateRefused(AccessDenied):
    """A side does not accept the other's certificate, or speaks no TLS while the other does."""


class InvalidSpec(RefusedError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class UnknownStrategy(RefusedError, ValueError):
    """Shoal has no strategy of that name."""


class UnsupportedOptimizer(RefusedError):
    """The strategy cannot run this optimizer."""


class ProposalConflict(RefusedError):
    """Members, or a member and its job, differ in what must be the same.

    `details` maps each field at fault to the values seen and who holds them.
    """


class UnequalPasses(RefusedError):
    """The members made different numbers of backward passes in a step, which was not committed.

    `details` maps each member to its number.
    """


class HyperparametersDiffer(RefusedError):
    """The members would apply other learning rates, or the like, than each other in a step, or than
    when it was taken before; it was not committed. `details` names the fields and who has what.
    """


class RegisteredStateDiffers(RefusedError):
    """Objects that a script registered differ between members. `details` maps each member to its
    value where they differ.
    """


class SampleFailed(RefusedError):
    """A dataset raised an error for a sample, or samples made no batch. `details["index"]` names
    the sample, where it is one."""


class PeersUnreachable(RefusedError):
    """The member and others cannot reach each other over the network; `details` names them."""


class BringUpFailed(RefusedError):
    """The member failed repeatedly to bring a generation up. The others continue without it."""


class MemberDrained(RefusedError):
    """The member was asked to leave, and has handed over: it has nothing left to do."""


class UnknownJob(RefusedError):
    """The coordinator knows no job of that name."""


class JobFinished(RefusedError):
    """The job is over. `shoal run --fresh` begins it anew under its name."""


class JobStopped(RefusedError):
    """The job was stopped, or it failed. `shoal retry` lets it be joined again."""


class JobInUse(RefusedError):
    """The job has members, and what was asked for would change everything under them."""


class UnknownMember(RefusedError):
    """The job has no member of that id."""


class UnknownGeneration(RefusedError):
    """The job has no generation of that number."""


class UnknownShard(RefusedError):
    """The server holds no such shard."""


class UnknownSnapshot(RefusedError):
    """The named storage has no such snapshot."""


class ForgottenPush(RefusedError):
    """The push is older than what its shard remembers: whether it was applied cannot be told."""


class StalePush(RefusedError):
    """The gradient is of values that too many updates came after: pull, and compute it anew."""


class UnknownSeries(RefusedError):
    """The coordinator knows no series of published weights of that name."""


class SeriesHeld(RefusedError):
    """Another script publishes this series, and its lease has not ended."""


class StaleEpoch(RefusedError):
    """The publisher was replaced: another one publishes the series now, under a later epoch."""


class PublicationAbandoned(RefusedError):
    """The publication will not become a version: a rank of it was lost, or its parts do not cover
    each element exactly once. Earlier versions are untouched."""


class VersionGone(RefusedError):
    """The version is not kept any more, or this reader's lease on it has ended."""


class Regressed(RefusedError):
    """The version is older than one that this reader has installed."""


class ShapeMismatch(RefusedError):
    """A tensor's shape or length is not the one that was agreed."""


class DtypeMismatch(RefusedError):
    """A tensor's dtype is not the one that was agreed."""


class NonFiniteGradient(RefusedError):
    """A gradient holds NaN or Inf. `details["parameter"]` names where."""


class TrainingFailed(RefusedError):
    """Training is complete, and its loss is not as required: it is not finite, or not lower than at
    the start although the script asks for that."""


class MalformedMessage(RefusedError):
    """The bytes are not a message of the expected type, or a required field is missing."""


class NoServers(RefusedError):
    """The cluster has no parameter server to hold the shards."""


class NothingLost(RefusedError):
    """A loss was to be accepted of what is not lost."""


class AddressInUse(RefusedError):
    """The address to serve on is taken."""


class ProtocolMismatch(RefusedError):
    """The two sides speak different versions of the protocol."""


class CorruptError(ShoalError):
    """Data differs from what was written, which is a fault of Shoal or of its storage. Stop, and do
    not continue from this data."""


class ChecksumMismatch(CorruptError):
    """Bytes changed in transit."""


class SnapshotDamaged(CorruptError):
    """A snapshot's file is not what was written. `details` names the file, and the shard if any."""


class JournalDamaged(CorruptError):
    """A journal holds something else than what was brought to disk. `details` names the file."""


class StateLost(CorruptError):
    """The state that the job had come to is not whole on the members that are left, or with nobody
    at all: go on from a checkpoint, or begin anew.

    Where members looked at what they hold, `details` maps each step to the first parts that nobody
    has. Where parameter servers lost a shard, it has `job`, `shard`, `epoch`, `table` for one of a
    table, `version`, the newest one that the member has seen, if any, and what the coordinator
    knows: `at_least_version`, `lost_unix_s`, `servers`, `on_disk`, `snapshot`.
    """


class JobQuarantined(CorruptError):
    """The coordinator cannot go on with this one job: what etcd holds of it cannot be read, or
    etcd refused to keep it. `details` holds the job and, of a record that cannot be read, its key.
    All other jobs go on; `shoal repair` shows what is wrong with this one, and mends it."""


class InternalError(CorruptError):
    """The peer failed in a way it has no name for; its log has the traceback."""
