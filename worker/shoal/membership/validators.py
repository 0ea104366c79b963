"""Validators: a script's own conditions on a generation. One member's rejection applies to all.

@shoal.validator("scratch-space")
def enough_scratch(roster: shoal.Roster) -> shoal.Reject | None:
    free = shutil.disk_usage("/scratch").free
    if free < 10e9:
        return shoal.Reject(seen=f"{free} bytes", expected="10 GB", fix="Clear /scratch.")
    return None

Each member runs its validators before each generation that it takes part in. If one rejects, the
generation does not form, and members that neither train already nor hold the job's state get a
ProposalConflict. All members of a job must have the same validators.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import is_name
from shoal_proto.short_lists import sendable
from shoal_proto.v1 import membership_pb2 as pb

MAX_TEXT = 500


@dataclass(frozen=True, kw_only=True)
class Reject:
    """Rejection of a roster by a validator. All members see its texts."""

    seen: str
    """Value that this member found."""
    expected: str = ""
    """Value that the validator would have accepted."""
    fix: str = ""
    """Advice for a person."""


@dataclass(frozen=True, kw_only=True)
class RosterMember:
    """Member of a generation that is about to start."""

    member_id: str
    rank: int
    host: str
    address: str
    """IP address at which the other members reach this one."""
    state: str
    """Origin of the member's training state: "initial" (the job's first), "keep" (its own),
    "receive" (from another member) or "checkpoint"."""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """A generation that is about to start, as its validators see it. Read-only."""

    generation: int
    members: tuple[RosterMember, ...]
    """Members by rank."""
    rank: int
    """This member's own rank."""
    step: int
    """Number of steps of the state from which all members start."""
    planned: bool
    """True if the previous generation still trains, and continues if this one is rejected."""
    synchronous: bool
    """True under a strategy with steps that all members take together."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the proposal, the same on all members: strategy, schema, torch, global_batch ..."""

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def own(self) -> RosterMember:
        """Entry of this member."""
        return self.members[self.rank]


Validator = Callable[[Roster], Reject | None]
V = TypeVar("V", bound=Validator)

REGISTERED: dict[str, Validator] = {}
"""Validators of all sessions of this process, by name."""


def validator(name: str) -> Callable[[V], V]:
    """Decorator of a function that every session of this process calls before each generation.

    The function runs on a background thread. All validators together have half of the coordinator's
    time limit for agreement: by default 5 s. A function that raises or takes longer counts as a
    rejection. Raises InvalidSpec for a name that is invalid, or taken by another function.
    """
    if not is_name(name):
        raise InvalidSpec(
            "a validator's name is not valid",
            seen=repr(name),
            expected="1 to 128 letters, digits, '.', '_' or '-', not starting with '.' or '-'",
        )

    def register(function: V) -> V:
        registered = REGISTERED.get(name)
        if registered is not None and _origin(registered) != _origin(function):
            raise InvalidSpec(
                f"two validators have the name {name!r}",
                seen=_origin(function),
                expected=f"only {_origin(registered)} to have this name",
                fix="Give one of them another name.",
            )
        REGISTERED[name] = function
        return function

    return register


def validators_of(own: Iterable[Validator]) -> dict[str, Validator]:
    """Return the registered validators and a session's own, by name or `__name__`. Raises
    InvalidSpec for an invalid name, and for one that two validators have."""
    by_name = dict(REGISTERED)
    registered = {id(function): name for name, function in REGISTERED.items()}
    for function in own:
        if id(function) in registered:
            continue
        name = getattr(function, "__name__", "")
        if not is_name(name):
            raise InvalidSpec(
                "a validator has no name", seen=repr(function), expected="a function with a name"
            )
        if by_name.get(name, function) is not function:
            raise InvalidSpec(f"two validators have the name {name!r}", seen=_origin(function))
        by_name[name] = function
    return by_name


class ValidatorSet:
    """A session's validators, which run on a separate thread."""

    def __init__(self, validators: Mapping[str, Validator], member_id: str) -> None:
        self._validators = dict(sorted(validators.items()))
        self._member_id = member_id
        self._running: _Run | None = None

    @property
    def names(self) -> str:
        """Names of the validators, for the proposal: all members must have the same."""
        return ",".join(self._validators)

    def rejections(self, roster: pb.Roster, limit_s: float) -> list[pb.Rejection]:
        """Return the validators' rejections of the roster, within `limit_s`. A validator that has
        not returned by then rejects this roster, and each later one until it returns."""
        if not self._validators:
            return []
        late = self._running
        if late is not None and late.thread.is_alive():
            # No second thread while the first one runs, which may never end.
            seen = f"still at work on generation {late.roster.generation}"
            return [_rejection(late.name, Reject(seen=seen, expected="an answer in time"))]
        run = self._running = _Run(self._validators, view(roster, self._member_id))
        run.thread.start()
        run.thread.join(limit_s)
        if not run.is_done:
            seen = f"no answer after {limit_s:g} s"
            run.rejected[run.name] = Reject(seen=seen, expected="an answer in time")
        return [_rejection(name, reject) for name, reject in dict(run.rejected).items()]


class _Run:
    def __init__(self, validators: Mapping[str, Validator], roster: Roster) -> None:
        self.roster = roster
        self.rejected: dict[str, Reject] = {}
        self.name = next(iter(validators))
        self.is_done = False
        self._validators = validators
        self.thread = threading.Thread(target=self._run, name="shoal-validators", daemon=True)

    def _run(self) -> None:
        for name, function in self._validators.items():
            self.name = name
            try:
                answer = function(self.roster)
            except BaseException as error:  # noqa: BLE001 - any exception is a rejection
                seen = f"{type(error).__name__}: {_shown(error, str)}"
                answer = Reject(seen=seen, expected="no exception")
            if answer is None:
                continue
            if not isinstance(answer, Reject):
                seen = f"it returned {_shown(answer, repr)}"
                answer = Reject(seen=seen, expected="None or shoal.Reject")
            self.rejected[name] = answer
        self.is_done = True


def _shown(value: object, text_of: Callable[[object], str]) -> str:
    """Text of a script's object, whose own methods may fail."""
    try:
        return text_of(value)
    except Exception as error:  # noqa: BLE001 - a script's code
        return f"a {type(value).__name__} whose text fails with {type(error).__name__}"


def view(roster: pb.Roster, member_id: str) -> Roster:
    """Return the roster in the form in which validators see it."""
    entries = sorted(roster.entries, key=lambda entry: entry.rank)
    members = tuple(
        RosterMember(
            member_id=entry.member_id,
            rank=entry.rank,
            host=entry.host,
            address=entry.address,
            state=pb.StateAction.Name(entry.state).removeprefix("STATE_ACTION_").lower(),
        )
        for entry in entries
    )
    return Roster(
        generation=roster.generation,
        members=members,
        rank=next(member.rank for member in members if member.member_id == member_id),
        step=roster.step,
        planned=roster.planned,
        synchronous=roster.synchronous,
        fields=MappingProxyType(dict(roster.fields)),
    )


def _rejection(name: str, reject: Reject) -> pb.Rejection:
    expected = _shown(reject.expected, str)
    if reject.fix:
        expected = f"{expected} ({_shown(reject.fix, str)})"
    return pb.Rejection(
        field=name,
        seen=sendable(_shown(reject.seen, str), MAX_TEXT),
        expected=sendable(expected, MAX_TEXT),
    )


def _origin(function: Validator) -> str:
    """Return module and name of a function: the same if the module is loaded again."""
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"
