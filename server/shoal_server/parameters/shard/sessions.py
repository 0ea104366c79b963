"""The outcomes of pushes that a shard remembers, by session, so that no push is applied twice.

A session is one incarnation of a member; its floor is the highest forgotten sequence. A push at or
below the floor that is not remembered is refused: it may have been applied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_proto.errors import ForgottenPush, InternalError, Overloaded
from shoal_proto.v1.replication_pb2 import SessionImage, StepScope
from shoal_server.parameters.shard.step_scope import Scope, to_message

MAX_SESSIONS = 1024
SESSION_BYTES, OUTCOME_BYTES = 512, 256
MAX_OUTCOMES = 8
"""Bound on a session's remembered outcomes, and so on a client's pushes in flight."""


@dataclass(frozen=True, slots=True)
class RememberedOutcome:
    """The answer to a push: the shard's new version, and the push's staleness."""

    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class RememberedSession:
    """The remembered pushes of one session. Immutable, so that `freeze` need not copy sessions."""

    floor: int = 0
    outcomes: Mapping[int, tuple[RememberedOutcome, Scope | None]] = field(default_factory=dict)
    """Outcomes by sequence, in the order applied."""


class SessionTable:
    """All sessions of a shard. Hold the shard's lock, unless a method needs none."""

    def __init__(
        self, *, max_sessions: int = MAX_SESSIONS, max_outcomes: int = MAX_OUTCOMES
    ) -> None:
        self.max_sessions = max_sessions
        """Bound on remembered sessions. Lowering it forgets none."""
        self._max_outcomes = max_outcomes
        self._sessions: dict[str, RememberedSession] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Approximate memory use. Needs no lock."""
        return self._num_bytes

    def recall(self, session: str, sequence: int) -> RememberedOutcome | None:
        """Return the first outcome of a push; None if the push or its session is unknown. Raises
        ForgottenPush for an unknown push at or below the floor."""
        known = self._sessions.get(session)
        if known is None:
            return None
        kept = known.outcomes.get(sequence)
        if kept is None and sequence <= known.floor:
            raise ForgottenPush(
                "the push is older than what the shard remembers of its session",
                seen=f"sequence {sequence}",
                expected=f"a sequence above {known.floor}",
                fix=f"Keep at most {self._max_outcomes} pushes unacknowledged.",
            )
        return None if kept is None else kept[0]

    def evict_for(self, session: str, is_live: Callable[[str], bool]) -> Sequence[str]:
        """Forget the sessions of fenced incarnations, and return them, if `session` would exceed
        `max_sessions`. Raises Overloaded if every remembered session is live. On backups, `forget`
        is called with the result."""
        if session in self._sessions or len(self._sessions) < self.max_sessions:
            return ()
        ended = [name for name in self._sessions if not is_live(name)]
        if not ended:
            raise Overloaded(
                "the shard remembers as many sessions as it may",
                seen=f"{len(self._sessions)} live sessions",
                expected=f"at most {self.max_sessions}",
                fix="Start the parameter servers with a larger --max-sessions, or train with fewer"
                " members.",
            )
        self.forget(ended)
        return ended

    def forget(self, sessions: Iterable[str]) -> None:
        """Forget these sessions; unknown ones are ignored."""
        for session in sessions:
            known = self._sessions.pop(session, None)
            if known is not None:
                self._num_bytes -= _bytes_of(session, known)

    def remember(
        self, session: str, sequence: int, outcome: RememberedOutcome, scope: Scope | None = None
    ) -> None:
        """Remember an applied push's outcome and scope. Call `evict_for` first."""
        known = self._sessions.get(session)
        if known is None:
            known = RememberedSession()
            self._num_bytes += _bytes_of(session, known)
        outcomes, floor = {**known.outcomes, sequence: (outcome, scope)}, known.floor
        while len(outcomes) > self._max_outcomes:
            oldest = min(outcomes)
            self._num_bytes -= _outcome_bytes(outcomes.pop(oldest)[1])
            floor = max(floor, oldest)
        self._num_bytes += _outcome_bytes(scope)
        self._sessions[session] = RememberedSession(floor, outcomes)

    def has_applied(self, session: str, sequence: int) -> bool:
        """True if a push was applied, or is too old to be remembered. Needs no lock."""
        known = self._sessions.get(session)
        return known is not None and (sequence <= known.floor or sequence in known.outcomes)

    def remembered(self) -> list[tuple[str, int, Scope | None]]:
        """List session, sequence and scope of all remembered pushes. Needs no lock."""
        return [
            (name, sequence, scope)
            for name, known in list(self._sessions.items())
            for sequence, (_, scope) in list(known.outcomes.items())
        ]

    def freeze(self) -> Mapping[str, RememberedSession]:
        """Return the sessions as of now."""
        return dict(self._sessions)

    def export(self) -> list[SessionImage]:
        """Encode all sessions, in the order first seen."""
        return exported(self._sessions)

    def restore(self, images: Iterable[SessionImage]) -> None:
        """Replace all sessions by what `export` encoded. Raises InternalError, without a change."""
        restored: dict[str, RememberedSession] = {}
        for image in images:
            scopes = [Scope.from_message(step) for step in image.steps] or [None] * len(
                image.sequences
            )
            counts = {len(image.sequences), len(image.versions), len(image.staleness), len(scopes)}
            if len(counts) > 1:
                raise InternalError(
                    f"the remembered pushes of session {image.session} are inconsistent",
                    seen=f"{sorted(counts)} entries",
                    expected="as many sequences as versions, staleness and steps",
                )
            outcomes = map(RememberedOutcome, image.versions, image.staleness)
            restored[image.session] = RememberedSession(
                image.floor,
                dict(zip(image.sequences, zip(outcomes, scopes, strict=True), strict=True)),
            )
        self._sessions = restored
        self._num_bytes = sum(_bytes_of(name, known) for name, known in restored.items())

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)


def _bytes_of(name: str, session: RememberedSession) -> int:
    outcomes = sum(_outcome_bytes(scope) for _, scope in session.outcomes.values())
    return SESSION_BYTES + len(name) + outcomes


def _outcome_bytes(scope: Scope | None) -> int:
    return OUTCOME_BYTES + (0 if scope is None else len(scope.shard_bits))


def exported(sessions: Mapping[str, RememberedSession]) -> list[SessionImage]:
    """Encode sessions that `SessionTable.freeze` returned, in their order."""
    return [
        SessionImage(
            session=name,
            floor=known.floor,
            sequences=known.outcomes,
            versions=[outcome.version for outcome, _ in known.outcomes.values()],
            staleness=[outcome.staleness for outcome, _ in known.outcomes.values()],
            steps=_exported([scope for _, scope in known.outcomes.values()]),
        )
        for name, known in sessions.items()
    ]


def _exported(scopes: Sequence[Scope | None]) -> list[StepScope]:
    if not any(scopes):
        return []
    return [to_message(scope) or StepScope() for scope in scopes]
