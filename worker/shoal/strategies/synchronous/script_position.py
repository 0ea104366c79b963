"""The position of a member's script between two steps, and the step after which it stops.

A shared call between steps (an evaluation, a sum) is repeated in the next generation if a member is
lost. The call ends with a collective, which confirms that all members have the result. A member
that has the result but loses a peer in that collective has an unconfirmed call: the next generation
shows if the others have the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from shoal.backends.abortable.gather import gather_rows
from shoal.layouts.layer_exchanges import LayerExchanges
from shoal.strategies.synchronous.script_points import ScriptPoint
from shoal.strategies.synchronous.state_inspection import StateInspection

NO_STATE = -1
NO_EXPONENT = -(2**20)
"""Sent for a `weight_exponent` that is None: below those of all floats."""


class CallInterrupted(OSError):
    """Raised if the other members are in a call that this member's script is not in.

    An OSError because a later attempt may succeed.
    """


class StepStopped(Exception):
    """Raised if no member takes the step, because a script has called `session.stop` before it."""


class StaleBatch(Exception):
    """Raised if no member takes the step, because its batch was made for an earlier generation."""


@dataclass
class ScriptPosition:
    """A member's position since the last committed step."""

    num_calls: int = 0
    in_call: bool = False
    unconfirmed: bool = False
    """True if the script has the result of a further call, which is not confirmed."""
    wish: int | None = None
    stop_at: int | None = None
    reason: str = ""
    leaves: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    checkpoint_at: int | None = None
    """Step at which all members write a checkpoint that is not due by its number: a member leaves
    after it, or an earlier generation ended before it had written one."""
    owed_checkpoint: int = 0
    """Step of the newest checkpoint that an earlier generation has perhaps not written, as this
    member knows, or any member once the positions are exchanged; 0: none."""
    has_stale_batch: bool = False
    """True if the batch of the step was made for an earlier generation: a member was lost in a
    shared call since then, so the batch may be another step's, and lacks the member's share."""
    is_shared: bool = False
    """True if the generation began with all members at the same step."""
    exchanges: LayerExchanges = field(default_factory=LayerExchanges, repr=False, compare=False)
    norms: list[float] = field(default_factory=list)
    weight_exponent: int | None = None
    """Logarithm of `StepWeights.unit` to base 2; None before the first weighted step."""
    inspection: StateInspection = field(default_factory=StateInspection, repr=False, compare=False)
    _wait: ScriptPoint | None = None
    """Point at which the script waits for others; its `step` is not set."""

    def set_wait_point(self, what: str, *, is_call: bool = False) -> None:
        """Set the point at which the script waits for others from now on; "" for none."""
        self._wait = ScriptPoint(step=0, num_calls=self.num_calls, what=what, is_call=is_call)

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Return a context in which the script waits in a shared call within a step."""
        before = self._wait
        self.set_wait_point(what, is_call=True)
        try:
            yield
        finally:
            self._wait = before

    def point(self, step: int) -> ScriptPoint:
        """Return the point at which the script waits, or one without description. Thread-safe."""
        wait = self._wait
        if wait is None or self.unconfirmed:
            return ScriptPoint(step=step, num_calls=self.num_calls, what="")
        return replace(wait, step=step)

    def stop(self, step: int, reason: str) -> None:
        """Note that the script wishes to stop after this step."""
        if self.wish is None:
            self.wish, self.reason = step, reason

    def agree_to_stop(self, step: int) -> None:
        """Note that all members stop after this step."""
        self.stop_at = step if self.stop_at is None else min(step, self.stop_at)

    def check_batch(self) -> None:
        """Raise StaleBatch in a step with a stale batch: on all members of the generation, since
        all of them have made the shared call."""
        if self.has_stale_batch:
            raise StaleBatch("a member was lost in a call since the batch was handed out")

    def undo(self, step: int) -> None:
        """Discard the wish to stop, and the checkpoint agreed on, of a rolled back step."""
        self._wait = None
        if self.wish is not None and self.wish > step:
            self.wish = None
        if self.checkpoint_at is not None and self.checkpoint_at > step:
            self.checkpoint_at = None

    def stepped(self) -> None:
        self._wait = None
        self.num_calls, self.unconfirmed = 0, False

    def note_result(self, *, confirmed: bool) -> None:
        """Note that the call in progress has a result."""
        self.in_call = False
        self._wait = None
        self.num_calls += int(confirmed)
        self.unconfirmed = not confirmed

    def exchange_positions(self, group: dist.ProcessGroup, step: int, *, has_state: bool) -> None:
        """Exchange positions, and determine if a call in progress is repeated or confirmed.

        Collective. Raises CallInterrupted if the others repeat a call that this member's script is
        not in.
        """
        self.is_shared = False
        self.exchanges = LayerExchanges()
        own = torch.tensor(self.as_integers(step, has_state=has_state))
        positions = gather_rows(own, group).tolist()
        self.follow(positions, step if has_state else NO_STATE)
        self.is_shared = has_state and all(row[0] == step for row in positions)

    def as_integers(self, step: int, *, has_state: bool) -> list[int]:
        """Return this member's position, to be sent to other members."""
        at_step = step if has_state else NO_STATE
        ends = [step for step in (self.wish, self.stop_at) if step is not None]
        end = min(ends) + 1 if ends else 0
        call = [self.num_calls, int(self.in_call), int(self.unconfirmed)]
        exponent = NO_EXPONENT if self.weight_exponent is None else self.weight_exponent
        return [at_step, *call, end, exponent, self.owed_checkpoint]

    def follow(self, positions: Sequence[Sequence[int]], own_step: int) -> None:
        """Apply the consequences of all members' positions. Raises what `exchange_positions`
        raises.
        """
        exponents = [row[5] for row in positions if row[5] != NO_EXPONENT]
        self.weight_exponent = max(exponents, default=None)
        self.owed_checkpoint = max(row[6] for row in positions)
        newest = max(step for step, *_ in positions)
        if newest == NO_STATE:
            return
        for end in (row[4] for row in positions if row[4]):
            self.agree_to_stop(end - 1)
        front = [row for row in positions if row[0] == newest]
        confirmed = max(row[1] for row in front)
        repeated = any(row[1] == confirmed and row[2] for row in front)
        returned = any(row[1] == confirmed and row[3] for row in front)
        is_front = own_step == newest
        if is_front and self.unconfirmed and self.num_calls < confirmed:
            self.num_calls, self.unconfirmed = confirmed, False
        elif repeated and not (is_front and self.in_call):
            raise CallInterrupted(
                "the other members are in a call between two steps, such as session.evaluate, "
                "and this member's script is not"
            )
        else:
            self.num_calls = confirmed + int(returned and not repeated)
            self.unconfirmed = False
