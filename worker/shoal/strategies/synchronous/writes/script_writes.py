"""What a script writes to parameters within a step."""

from collections.abc import Mapping

import structlog
import torch
from torch import Tensor

from shoal.strategies.synchronous.writes.parameter_watch import OwnParts, ParameterWatch
from shoal.torch_private.tensors import foreach_copy_

log = structlog.get_logger(__name__)

FIRST_STEPS = 3
"""Of each parameter on this member. In the first one a teacher that began as a copy moves nowhere,
and in the next one neither if the first had a learning rate of 0."""


class ScriptWrites:
    """What a script writes to parameters within a step: as sharpness-aware minimisation does
    between two passes, as a teacher in the model follows its student in the forward pass.

    A script that does no such thing is not to pay for copies. In the first steps all parameters are
    copied as the step begins, to the host, so that what a script does from the start is known; from
    then on those that it has written to, beside them. The others are looked at when the step ends,
    however it does. What is found then, of a script that writes for the first time, cannot be taken
    back; from the next step on it can.
    """

    def __init__(self) -> None:
        self._parameters: Mapping[str, Tensor] = {}
        self._own = OwnParts({})
        self._watch = ParameterWatch({})
        self._copies: dict[str, Tensor] = {}
        self._num_steps: dict[str, int] = {}
        """Committed ones, up to `FIRST_STEPS`, by parameter. Over all generations."""
        self._written: set[str] = set()
        """Those that the script has written to. Over all generations."""
        self._is_planned = False
        self._is_open = self._is_watched = False
        """Whether a step is under way, and whether what changes in it is the script's doing."""
        self._is_updated = False
        """Whether the session has changed parameters since the step began."""
        self._is_lost = False
        """Whether a parameter was written to in this step of which there is no copy."""

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """A step begins. The same mapping in all steps of a generation: of all parameters that this
        member has, in the memory where it keeps them."""
        if parameters is not self._parameters:
            self._parameters, self._own = parameters, OwnParts(parameters)
            self._copies, self._is_planned = {}, False
        if not self._is_planned:
            self._plan()
        if self._copies:
            with torch.no_grad():
                foreach_copy_(list(self._copies.values()), self._own.present(self._copies))
        self._watch.mark()
        self._is_open = self._is_watched = True
        self._is_updated = self._is_lost = False

    def _plan(self) -> None:
        """Which parameters are copied, and which are looked at."""
        held, kept, self._copies = self._own.parameters, self._copies, {}
        for name, own in zip(held, self._own.all(), strict=True):
            is_written = name in self._written
            if is_written or self._num_steps.get(name, 0) < FIRST_STEPS:
                device = own.device if is_written else torch.device("cpu")
                copy = kept.get(name)
                if copy is None or copy.device != device:
                    copy = torch.empty_like(own, device=device)
                self._copies[name] = copy
        self._watch = ParameterWatch(
            {n: each for n, each in held.items() if n not in self._written}
        )
        self._is_planned = True

    def note(self, *, closely: bool = False) -> None:
        """What has changed by now the script has written: the session changes nothing but from
        `updating` to `updated`, and behind `settle`. `closely`: whatever it takes."""
        if self._is_watched and (found := self._watch.changed(closely=closely)):
            self._written |= found
            self._is_lost = self._is_lost or not found <= self._copies.keys()
            self._is_planned = False

    @property
    def is_lost(self) -> bool:
        """Whether a parameter was written to in this step that cannot be given back what it
        held, as far as `note` has seen."""
        return self._is_lost

    @property
    def before(self) -> Mapping[str, Tensor]:
        """What was copied when the step began, by name."""
        return self._copies

    def updating(self) -> None:
        """The session is about to change parameters within the step."""
        self.note()
        self._is_watched, self._is_updated = False, True

    def updated(self) -> None:
        """The session has done so."""
        self._watch.mark()
        self._is_watched = True

    def settle(self) -> None:
        """From here on the step changes parameters by the optimizer alone, and is then
        committed."""
        self.note()
        self._is_open = self._is_watched = False
        fresh = [name for name in self._copies if name not in self._written]
        if not fresh:
            return
        if not self._is_updated:
            pairs = zip(fresh, self._own.present(fresh), strict=True)
            copies = self._copies
            with torch.no_grad():
                self._written |= {
                    n for n, own in pairs if not own.to(copies[n].device).equal(copies[n])
                }
        for name in fresh:
            self._num_steps[name] = self._num_steps.get(name, 0) + 1
        if self._num_steps[fresh[0]] == FIRST_STEPS:
            self._copies = {n: copy for n, copy in self._copies.items() if n in self._written}
        self._is_planned = False

    @torch.no_grad()
    def restore(self) -> bool:
        """The step does not happen, and `note` has seen that; whether its parameters are again as
        when it began."""
        if not self._is_open:
            return True
        self._is_open = self._is_watched = False
        foreach_copy_(self._own.present(self._copies), list(self._copies.values()))
        if self._is_lost:
            log.warning(
                "step_not_undone",
                seen="parameters that the script wrote to for the first time, in a step that did"
                " not happen",
                hint="this member's weights are none that were committed: it takes those of another"
                " member, of copies or of a checkpoint",
            )
        return not self._is_lost

    def forget(self) -> None:
        """Let go of the model."""
        self._parameters, self._own, self._watch = {}, OwnParts({}), ParameterWatch({})
        self._copies, self._is_open, self._is_watched = {}, False, False
