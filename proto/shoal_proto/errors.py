"""Errors that Shoal raises, sorted by what the caller should do. `shoal_proto.status` transmits
them: the same class is raised on both sides of a call.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class ShoalError(Exception):
    """The root of all errors. `str()` gives one sentence; use the attributes in code."""

    kinds: ClassVar[dict[str, type["ShoalError"]]] = {}
    _PARTS: ClassVar = ("what", "seen", "expected", "fix", "details")

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
        """Return the error as a dictionary of JSON values."""
        parts = {key: getattr(self, key) for key in ShoalError._PARTS}
        return {"kind": type(self).__name__, **parts}

    @staticmethod
    def from_dict(parts: Mapping[str, Any]) -> "ShoalError":
        """Return the error that `to_dict` made into `parts`; an InternalError for an unknown kind.
        Unknown parts are ignored."""
        kind = ShoalError.kinds.get(parts["kind"], InternalError)
        return kind(**{key: parts[key] for key in ShoalError._PARTS if key in parts})

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
    """The same call may succeed a little later."""


class Unavailable(RetryError):
    """The peer cannot be reached, or is not serving yet."""


class NotLeader(RetryError):
    """The called coordinator does not lead. `details["leader"]` is the leader's address, if
    known."""


class DeadlineExceeded(RetryError):
    """The time limit passed. The call may or may not have taken effect."""


class ShardNotReady(RetryError):
    """The shard's primary has no values yet, or must not serve them yet."""


class WrongEpoch(RetryError):
    """The sender's view of the shard map is out of date: fetch the map, then retry."""


class Overloaded(RetryError):
    """A bound of memory, of a queue or of a table is reached."""


class DiskFull(Overloaded):
    """The disk of a server's journal is full. Durable pushes are retried until there is space."""


class CheckpointFailed(RetryError):
    """A checkpoint was not written in time, or not at all; training is not affected. `details` has
    its path, and the rank and errno if writing failed.
    """


class LoadingFailed(RetryError):
    """Samples could not be loaded: storage failed, or a loading process has ended or did not start.
    `details["index"]` names a single sample."""


class SnapshotFailed(RetryError):
    """The snapshot was not taken; parameters are unchanged. Files may be left if storage failed."""


class RejoinError(ShoalError):
    """The caller's membership has ended or is out of date: join again to continue."""


class Fenced(RejoinError):
    """The token is stale, or the job was started over. `details["generation"]`, if present, is the
    current one."""


class GenerationBroken(RejoinError):
    """The generation is over or cannot go on, for example because a member was lost."""


class LeaseExpired(RejoinError):
    """The lease under which a key was to be written has expired."""


class RefusedError(ShoalError):
    """The caller's fault: the same request will be refused again."""


class AccessDenied(RefusedError):
    """The credentials are missing or wrong, or do not permit the request."""


class CertificateRefused(AccessDenied):
    """The other side does not accept this side's certificate, or only one side uses TLS."""


class InvalidSpec(RefusedError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class UnknownStrategy(RefusedError, ValueError):
    """Shoal has no strategy of that name."""


class UnsupportedOptimizer(RefusedError):
    """The strategy cannot run this optimizer."""


class ProposalConflict(RefusedError):
    """Members, or a member and its job, differ in a field that must be the same. `details` has each
    value of such a field, with its members.
    """


class UnequalPasses(RefusedError):
    """Members made different numbers of backward passes in a step, or took different actions with
    their optimizers. The step was not committed. `details` maps each member to what it did.
    """


class HyperparametersDiffer(RefusedError):
    """Members would apply different hyperparameters in a step, or the step was taken before with
    different ones. The step was not committed. `details` has the fields, and each member's
    values.
    """


class RegisteredStateDiffers(RefusedError):
    """Objects that a script registered differ between members. `details` maps each member to its
    value at the first difference.
    """


class SampleFailed(RefusedError):
    """A dataset raised an error for a sample, or samples did not make a batch. `details["index"]`
    names a single sample."""


class PeersUnreachable(RefusedError):
    """The member and others cannot reach each other; the message names them."""


class BringUpFailed(RefusedError):
    """The member failed repeatedly in the bring-up of a generation. The others continue without
    it."""


class MemberDrained(RefusedError):
    """The member was asked to leave, and has handed over."""


class UnknownJob(RefusedError):
    """The coordinator knows no job of that name."""


class JobFinished(RefusedError):
    """The job is finished. `shoal run --fresh` starts a new run under its name."""


class JobStopped(RefusedError):
    """The job was stopped, or it failed. `shoal retry` allows members to join it again."""


class JobInUse(RefusedError):
    """The job has members, and the request would change the job's state."""


class UnknownMember(RefusedError):
    """The job has no member of that id."""


class UnknownGeneration(RefusedError):
    """The job has no generation of that number."""


class UnknownShard(RefusedError):
    """The job or table has no such shard."""


class UnknownSnapshot(RefusedError):
    """The named storage has no such snapshot."""


class ForgottenPush(RefusedError):
    """The push is older than those that its shard remembers: it may have been applied or not."""


class StalePush(RefusedError):
    """The gradient was computed on values that are too old, or were lost: pull, and compute it
    anew."""


class UnknownSeries(RefusedError):
    """The coordinator knows no series of published weights of that name."""


class SeriesHeld(RefusedError):
    """Another process publishes this series, and its lease has not ended."""


class StaleEpoch(RefusedError):
    """Another publisher, with a later epoch, has replaced the caller."""


class PublicationAbandoned(RefusedError):
    """The publication will not become a version: a rank was lost, or the parts do not cover each
    element exactly once. Also raised if an engine could not load a version."""


class VersionGone(RefusedError):
    """The version is not kept any more, or this reader's lease on it has ended."""


class Regressed(RefusedError):
    """The version is older than one that this reader has installed."""


class ShapeMismatch(RefusedError):
    """A tensor does not have the expected shape or length."""


class DtypeMismatch(RefusedError):
    """A tensor does not have the expected dtype."""


class NonFiniteGradient(RefusedError):
    """A loss, a gradient, or a value at the end of a round of `local-sgd` or `diloco` is NaN or
    Inf. `details["parameter"]` names the parameter or the table. It is empty for a loss, and if the
    sum of the members' gradients overflowed in no parameter that this member sees."""


class TrainingFailed(RefusedError):
    """Training is complete, but its loss is not finite, or not lower than at the start although the
    script requires that."""


class MalformedMessage(RefusedError):
    """The bytes are not a message of the expected type, or a field or value is missing or not valid
    at this point."""


class NoServers(RefusedError):
    """The cluster has no parameter server to hold the shards."""


class NothingLost(RefusedError):
    """A loss was to be accepted or repaired, but nothing is lost."""


class AddressInUse(RefusedError):
    """The address to serve on, the server's id or the journal's directory is taken."""


class ProtocolMismatch(RefusedError):
    """The two sides speak different versions of the protocol."""


class CorruptError(ShoalError):
    """Data differs from what was written, cannot be read or is lost; or Shoal has a bug. Stop, and
    do not continue from this data."""


class ChecksumMismatch(CorruptError):
    """Bytes do not have the checksum or digest that was sent or requested."""


class SnapshotDamaged(CorruptError):
    """A snapshot's file is not what was written, or its files do not fit together. `details` names
    the file, and the shard if any; or the snapshot's number."""


class JournalDamaged(CorruptError):
    """A journal's file is not what was written, or cannot be applied. The message names the
    file."""


class StateLost(CorruptError):
    """The job's newest state is not complete on the members that are left, or on the parameter
    servers: continue from a checkpoint or snapshot, or start over.

    If members lack parts, `details` maps each step to the first parts that no member has. If
    parameter servers lost a shard, `details` has `job`, `shard`, `epoch`; `table` if the shard is
    part of a table; `version`, the newest that the member has seen, if any; and what the
    coordinator knows: `at_least_version`, `lost_unix_s`, `servers`, `on_disk`, `snapshot`.
    """


class JobQuarantined(CorruptError):
    """The coordinator cannot continue this job: a record in etcd cannot be read, or a change could
    not be stored. `details` has the job and, for an unreadable record, its key. `shoal repair`
    shows what is wrong, and repairs it."""


class InternalError(CorruptError):
    """An unexpected error. If it came from the peer, the peer's log has the traceback. Also raised
    for errors of kinds that this release does not know.
    """
