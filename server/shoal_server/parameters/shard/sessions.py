"""What a shard remembers of each session's pushes, so that none is ever applied twice.

A session is one incarnation of a member. Both numbers of it are bounded: how many sessions, and
how many outcomes of each. What falls out of a session's memory leaves a floor behind: a push at or
below the floor that is not remembered is refused, because whether it was applied cannot be told.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_proto.errors import ForgottenPush, InternalError, Overloaded
from shoal_proto.v1.replication_pb2 import SessionImage, StepScope
from shoal_server.parameters.shard.step_scope import Scope, to_message

MAX_SESSIONS = 1024
"""Of a shard, unless the server is started with another number."""
SESSION_BYTES, OUTCOME_BYTES = 512, 256
"""What Python takes for each, beside names and the bits of scopes."""
MAX_OUTCOMES = 8
"""A client keeps at most so many pushes in flight."""


@dataclass(frozen=True, slots=True)
class RememberedOutcome:
    """What a push was answered: the version right after it, and its staleness."""

    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class RememberedSession:
    """Never changed: another one takes its place. So whoever has it keeps what it was."""

    floor: int = 0
    outcomes: Mapping[int, tuple[RememberedOutcome, Scope | None]] = field(default_factory=dict)
    """By sequence, in the order in which the pushes came."""


class SessionTable:
    """Part of a shard's state: who holds the shard's lock may call it."""

    def __init__(
        self, *, max_sessions: int = MAX_SESSIONS, max_outcomes: int = MAX_OUTCOMES
    ) -> None:
        self.max_sessions = max_sessions
        """May be changed: what is remembered already stays."""
        self._max_outcomes = max_outcomes
        self._sessions: dict[str, RememberedSession] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes. Needs no lock."""
        return self._num_bytes

    def recall(self, session: str, sequence: int) -> RememberedOutcome | None:
        """The first outcome of a push; None if it was never applied.

        Raises ForgottenPush for one that is older than what is remembered.
        """
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

    def make_room(self, session: str, is_live: Callable[[str], bool]) -> Sequence[str]:
        """See to it that `session` can be remembered; which sessions were forgotten for it.

        Only a fenced incarnation's session may go: none of its pushes will be let in again.
        Raises Overloaded when every remembered session lives. A copy of the shard has to `forget`
        the same ones: it does not know who lives.
        """
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
        """Remember nothing of these sessions any more; unknown ones are passed over."""
        for session in sessions:
            known = self._sessions.pop(session, None)
            if known is not None:
                self._num_bytes -= _bytes_of(session, known)

    def remember(
        self, session: str, sequence: int, outcome: RememberedOutcome, scope: Scope | None = None
    ) -> None:
        """Keep the outcome of an applied push, and what else belongs to its step. `make_room` has
        passed for the session."""
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
        """Whether a push was applied, or is so old that this is forgotten. Needs no lock."""
        known = self._sessions.get(session)
        return known is not None and (sequence <= known.floor or sequence in known.outcomes)

    def remembered(self) -> list[tuple[str, int, Scope | None]]:
        """Session, sequence and scope of every push whose outcome is known. Needs no lock."""
        return [
            (name, sequence, scope)
            for name, known in list(self._sessions.items())
            for sequence, (_, scope) in list(known.outcomes.items())
        ]

    def freeze(self) -> Mapping[str, RememberedSession]:
        """All that is remembered now, whatever comes later."""
        return dict(self._sessions)

    def export(self) -> list[SessionImage]:
        """All that is remembered, in the order in which sessions and pushes came."""
        return exported(self._sessions)

    def restore(self, images: Iterable[SessionImage]) -> None:
        """Remember what `export` gave, and nothing else. Raises InternalError if it is torn."""
        restored: dict[str, RememberedSession] = {}
        for image in images:
            scopes = [Scope.from_message(step) for step in image.steps] or [None] * len(
                image.sequences
            )
            counts = {len(image.sequences), len(image.versions), len(image.staleness), len(scopes)}
            if len(counts) > 1:
                raise InternalError(
                    f"the memory of session {image.session} is torn",
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

    def __len__(self) -> int:
        return len(self._sessions)


def _bytes_of(name: str, session: RememberedSession) -> int:
    outcomes = sum(_outcome_bytes(scope) for _, scope in session.outcomes.values())
    return SESSION_BYTES + len(name) + outcomes


def _outcome_bytes(scope: Scope | None) -> int:
    return OUTCOME_BYTES + (0 if scope is None else len(scope.shard_bits))


def exported(sessions: Mapping[str, RememberedSession]) -> list[SessionImage]:
    """What `SessionTable.freeze` gave, as messages in its order."""
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
    """One message for each scope; none where there is no scope."""
    if not any(scopes):
        return []
    return [to_message(scope) or StepScope() for scope in scopes]
