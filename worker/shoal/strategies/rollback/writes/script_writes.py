"""Writes of a script to parameters within a step."""

from collections.abc import Mapping, Sequence

import structlog
import torch
from torch import Tensor

from shoal.state.host_copies import copy_staged
from shoal.strategies.rollback.writes.parameter_watch import OwnParts, ParameterWatch
from shoal.torch_private.tensors import foreach_copy_

log = structlog.get_logger(__name__)

FIRST_STEPS = 3
"""Number of steps in which each parameter is copied. More than one, as a teacher (a moving average)
that began as a copy does not change in the first step, nor in the second if the first had a
learning rate of 0."""
PART_OF_FREE_MEMORY = 8
"""Copies of the first steps may take 1/8 of a GPU's free memory: gradients, the optimizer's state
and activations are allocated later."""


class ScriptWrites:
    """Writes of a script to parameters within a step: by sharpness-aware minimisation between two
    passes, for example, or by a model that updates a teacher in its forward pass.

    A script without such writes should not pay for copies. In the first steps all parameters are
    copied when a step begins, which covers scripts that write from the start. Copies are on the
    same device, or on the host if a GPU has too little memory. Later only parameters that the
    script has written to are copied; the others are watched for writes. The first write to one of
    these cannot be undone; from the next step on, writes to it can.
    """

    def __init__(self) -> None:
        self._parameters: Mapping[str, Tensor] = {}
        self._own = OwnParts({})
        self._watch = ParameterWatch({})
        self._copies: dict[str, Tensor] = {}
        self._num_steps: dict[str, int] = {}
        """Number of steps in which a parameter was copied, up to `FIRST_STEPS`; in all
        generations."""
        self._written: set[str] = set()
        """Parameters that the script has written to, in all generations."""
        self._is_planned = False
        self._is_open = self._is_watched = False
        """True if a step is in progress; and True if a change would be the script's."""
        self._is_updated = False
        """True if the session has changed parameters since the step began."""
        self._is_lost = False
        """True if the script has written to a parameter without a copy in this step."""

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin a step. `parameters`: all parameters that this member has, not gathered ones; the
        same mapping in all steps of a generation."""
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
        has_memory = all(has_memory_for(fresh, device) for device in {own.device for own in fresh})
        for name, own in copied.items():
            is_beside = name in self._written or has_memory
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
        `updating` and `updated`, and after `settle`. `closely`: see `ParameterWatch`."""
        if self._is_watched and (found := self._watch.changed(closely=closely)):
            self._written |= found
            self._is_lost = self._is_lost or not found <= self._copies.keys()
            self._is_planned = False

    @property
    def is_lost(self) -> bool:
        """True if `note` has found a write in this step that cannot be undone."""
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
        """Return the names of parameters that differ from their copies."""
        pairs = zip((self._copies[name] for name in names), self._own.present(names), strict=True)
        are_same = [own.eq(copy.to(own.device)).all() for copy, own in pairs]
        # Stacked, so that one read waits for all.
        same_by_name = torch.stack([each.to(are_same[0].device) for each in are_same]).tolist()
        return {name for name, is_same in zip(names, same_by_name, strict=True) if not is_same}

    @torch.no_grad()
    def restore(self) -> bool:
        """Undo the step, after `note`; return True if all parameters are as when the step began."""
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


def has_memory_for(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """True if the device has memory for copies of those of the tensors that are on it."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    num_bytes = sum(each.nbytes for each in tensors if each.device == device)
    return num_bytes <= free_bytes // PART_OF_FREE_MEMORY
