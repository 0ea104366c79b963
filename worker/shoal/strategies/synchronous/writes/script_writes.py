"""Writes of a script to parameters within a step."""

from collections.abc import Mapping, Sequence

import structlog
import torch
from torch import Tensor

from shoal.state.host_copies import copy_staged
from shoal.strategies.synchronous.writes.parameter_watch import OwnParts, ParameterWatch
from shoal.torch_private.tensors import foreach_copy_

log = structlog.get_logger(__name__)

FIRST_STEPS = 3
"""Steps in which each parameter is copied. In the first, a teacher that began as a copy does not
move, nor in the second if the first had a learning rate of 0."""
PART_OF_FREE_MEMORY = 8
"""Copies of the first steps may take one in so many parts of a GPU's free memory: gradients, the
optimizer's state and activations are allocated later."""


class ScriptWrites:
    """Writes of a script to parameters within a step: sharpness-aware minimisation writes between
    two passes, a teacher in the model follows its student in the forward pass.

    A script without such writes should not pay for copies. In the first steps all parameters are
    copied as the step begins, which covers scripts that write from the start. The copies lie on the
    same device, or on the host if a GPU has too little memory. From then on only parameters that
    the script has written to are copied. The others are compared when the step ends, in any way. A
    first write that is found then cannot be undone; from the next step on writes can.
    """

    def __init__(self) -> None:
        self._parameters: Mapping[str, Tensor] = {}
        self._own = OwnParts({})
        self._watch = ParameterWatch({})
        self._copies: dict[str, Tensor] = {}
        self._num_steps: dict[str, int] = {}
        """Number of committed steps by parameter, up to `FIRST_STEPS`. Over all generations."""
        self._written: set[str] = set()
        """Parameters that the script has written to. Over all generations."""
        self._is_planned = False
        self._is_open = self._is_watched = False
        """True if a step is in progress; True if changes in it are the script's."""
        self._is_updated = False
        """True if the session has changed parameters since the step began."""
        self._is_lost = False
        """True if a parameter was written to in this step that has no copy."""

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin a step. `parameters`: the same mapping in all steps of a generation, of all
        parameters that this member has, in their lasting memory."""
        if parameters is not self._parameters:
            self._parameters, self._own = parameters, OwnParts(parameters)
            self._copies, self._is_planned = {}, False
        if not self._is_planned:
            self._plan()
        if self._copies:
            self._copy()
        self._watch.mark()
        self._is_open = self._is_watched = True
        self._is_updated = self._is_lost = False

    @torch.no_grad()
    def _copy(self) -> None:
        pairs = list(zip(self._copies.values(), self._own.present(self._copies), strict=True))
        beside = [(copy, own) for copy, own in pairs if copy.device == own.device]
        foreach_copy_([copy for copy, _ in beside], [own for _, own in beside])
        away = [(copy, own) for copy, own in pairs if copy.device != own.device]
        copy_staged([copy for copy, _ in away], [own for _, own in away])

    def _plan(self) -> None:
        """Choose the parameters that are copied, and those that are watched."""
        held, kept, self._copies = self._own.parameters, self._copies, {}
        copied = {
            name: own
            for name, own in zip(held, self._own.all(), strict=True)
            if name in self._written or self._num_steps.get(name, 0) < FIRST_STEPS
        }
        fresh = [
            own
            for name, own in copied.items()
            if (copy := kept.get(name)) is None or copy.device != own.device
        ]
        has_room = all(has_room_for(fresh, device) for device in {own.device for own in fresh})
        for name, own in copied.items():
            is_beside = name in self._written or has_room
            copy = kept.get(name)
            if copy is None or (is_beside and copy.device != own.device):
                copy = torch.empty_like(own, device=own.device if is_beside else "cpu")
            self._copies[name] = copy
        self._watch = ParameterWatch(
            {n: each for n, each in held.items() if n not in self._written}
        )
        self._is_planned = True

    def note(self, *, closely: bool = False) -> None:
        """Attribute changes so far to the script: the session changes parameters only between
        `updating` and `updated`, and after `settle`. `closely`: compare all, at any cost."""
        if self._is_watched and (found := self._watch.changed(closely=closely)):
            self._written |= found
            self._is_lost = self._is_lost or not found <= self._copies.keys()
            self._is_planned = False

    @property
    def is_lost(self) -> bool:
        """True if `note` has seen a write, in this step, to a parameter that cannot be
        restored."""
        return self._is_lost

    @property
    def before(self) -> Mapping[str, Tensor]:
        """Copies from the beginning of the step, by name."""
        return self._copies

    def updating(self) -> None:
        """Note that the session is about to change parameters within the step."""
        self.note()
        self._is_watched, self._is_updated = False, True

    def updated(self) -> None:
        """Note that the session has changed the parameters."""
        self._watch.mark()
        self._is_watched = True

    def settle(self) -> None:
        """Note that, from here on, only the optimizer changes parameters, before the step is
        committed."""
        self.note()
        self._is_open = self._is_watched = False
        fresh = [name for name in self._copies if name not in self._written]
        if not fresh:
            return
        if not self._is_updated:
            self._written |= self._differing(fresh)
        for name in fresh:
            self._num_steps[name] = self._num_steps.get(name, 0) + 1
        if self._num_steps[fresh[0]] == FIRST_STEPS:
            self._copies = {n: copy for n, copy in self._copies.items() if n in self._written}
        self._is_planned = False

    @torch.no_grad()
    def _differing(self, names: Sequence[str]) -> set[str]:
        """Names of parameters that differ from their copies."""
        pairs = zip((self._copies[name] for name in names), self._own.present(names), strict=True)
        are_same = [own.eq(copy.to(own.device)).all() for copy, own in pairs]
        # Stacked, so that one look waits for all.
        told = torch.stack([each.to(are_same[0].device) for each in are_same]).tolist()
        return {name for name, is_same in zip(names, told, strict=True) if not is_same}

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo the step, after `note`; True if its parameters are again as when the step
        began."""
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
        """Release the model."""
        self._parameters, self._own, self._watch = {}, OwnParts({}), ParameterWatch({})
        self._copies, self._is_open, self._is_watched = {}, False, False


def has_room_for(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """True if this device has memory for copies of those tensors that are on it."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    num_bytes = sum(each.nbytes for each in tensors if each.device == device)
    return num_bytes <= free_bytes // PART_OF_FREE_MEMORY
