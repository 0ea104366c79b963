"""Snapshot of what a step writes, as of the step's beginning, so that the step can be undone.

Only the first few steps copy a whole model. Later steps save what was written before, and watch the
rest for writes.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.gradients import is_on_host
from shoal.model.trained_parameters import are_same
from shoal.state.host_copies import copy_staged
from shoal.strategies.rollback.buffers import StepBuffers
from shoal.strategies.rollback.parameter_watch import own_parts
from shoal.strategies.rollback.script_writes import ParameterWrites, StateWrites, tensors_of
from shoal.torch_private.tensors import foreach_copy_, num_writes
from shoal_proto.errors import GenerationBroken, InvalidSpec, StateLost

log = structlog.get_logger(__name__)

HOST = torch.device("cpu")
_OUTLINE = attrgetter("shape", "dtype", "device")
PART_OF_FREE_MEMORY = 8
"""Copies may take 1 / `PART_OF_FREE_MEMORY` of a GPU's free memory."""


class StepSnapshot:
    """Everything that a step writes to a model and its optimizers, as of the step's beginning.

    `begin` opens the step. The step ends with `restore`, which undoes it; or with `settle`, the
    optimizer's own step, and `commit`. `refuses_late`: see `StepBuffers`.
    """

    def __init__(self, *, refuses_late: bool = True) -> None:
        self.is_open = False
        self.is_whole = True
        """True if the tensors belong to a committed step, or to one that can be undone."""
        self._is_lost = False
        self._saved = SavedTensors()
        self._buffers = StepBuffers(refuses_late=refuses_late)
        self._parameters = ParameterWrites()
        self._state = StateWrites()

    def begin(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        optimizers: Collection[Optimizer] = (),
    ) -> None:
        """Begin a step. Raises InvalidSpec if `settle_buffers` does.

        `parameters`: all of this member's, not gathered; must be the same mapping in all steps of a
        generation.
        """
        lasting, transient = self._buffers.begin(model)
        written, fresh = self._parameters.begin(parameters)
        state = self._state.begin(optimizers)
        self._saved.begin([*lasting, *written, *state], spare=fresh, constant=transient)
        self.is_open = self.is_whole = True
        self._is_lost = False

    def _note(self, *, closely: bool = False) -> None:
        """Attribute changes so far to the script. `closely`: see `ParameterWatch`."""
        if self.is_open:
            written = [*self._parameters.written(closely=closely), *self._state.written()]
            self._is_lost = self._is_lost or not all(map(self._saved.has, written))

    @contextmanager
    def updating(self, optimizers: Collection[Optimizer], held: Sequence[Tensor]) -> Iterator[None]:
        """Return a context in which these optimizers step before the end of the session's step.

        `held`: this member's tensors that the optimizers may change.
        """
        self._note()
        self._saved.add([*held, *tensors_of(optimizers)])
        self._state.save(optimizers)
        self._parameters.pause()
        yield
        self._parameters.resume()
        self._state.resume()

    def check_buffers(self, step: int) -> None:
        """Raise InvalidSpec if a pass of this step has changed a buffer outside the state_dict."""
        if changed := self._buffers.names_of(self._saved.changed_constants()):
            raise InvalidSpec(
                f"the model has changed buffers in step {step} that are not in its state_dict",
                seen=", ".join(changed[:5]),
                expected="buffers that change to be persistent: other buffers have their initial"
                " values again on a member that joins, and in each new generation",
                fix="Use register_buffer without persistent=False, or strategy 'ddp'.",
            )

    def settle_buffers(self) -> None:
        """Copy the contents of replaced buffers into the model's own, before state is collected.

        Raises InvalidSpec if a replacement does not fit.
        """
        self._buffers.lasting.settle()

    def settle(self) -> None:
        """End the part of the step that can be undone. Raises InvalidSpec if `settle_buffers`
        does.
        """
        self._buffers.lasting.settle()
        self._note()
        if self.is_open:
            self._parameters.settle(self._saved.copy_of)
        self.is_open = self.is_whole = False

    def commit(self) -> None:
        self._saved.end()
        self.is_whole = True

    def restore(self) -> None:
        """Undo the step in progress, unless it is settled.

        Afterwards `is_whole` is False if the script has written to a tensor that is not saved.
        """
        if not self.is_open:
            return
        # Note the script's writes first: restoring writes to the tensors too.
        self._note(closely=True)
        self.is_open = False
        self._saved.restore()
        self._buffers.lasting.reinstall()
        self._state.reinstall()
        if self._is_lost:
            self.is_whole = False
            log.warning(
                "step_not_undone",
                seen="weights, or state of the optimizer, that the script wrote to for the first"
                " time, in a step that did not happen",
                hint="this member's weights belong to no committed step: they are replaced from"
                " another member, from copies or from a checkpoint",
            )

    def check_whole(self, step: int) -> None:
        """Raise StateLost if a failed step has left weights that belong to no committed step."""
        if not self.is_whole:
            raise StateLost(
                f"step {step} was not taken, and its writes to weights cannot be undone",
                seen="weights, or state of the optimizer, that the script wrote to for the first"
                " time, in that step",
                expected="writes from the first step on, or after a step",
                fix="Start the job again from a checkpoint.",
            )

    @contextmanager
    def state_at_step_start(self, held: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Return a context in which optimizers have their state from when the step began.

        Yields copies of the held tensors that may have changed since. Raises GenerationBroken if
        the script has written to a tensor that is not saved.
        """
        self._note(closely=True)
        if self._is_lost:
            raise GenerationBroken(
                "the script has written to weights, or to the optimizer's state, for the first"
                " time, in a step: the state from before the step cannot be copied to other members"
            )
        copies = ((name, self._saved.copy_of(each)) for name, each in held.items())
        with self._state.state_at_step_start(self._saved.copy_of):
            yield {name: copy for name, copy in copies if copy is not None}

    def forget(self) -> None:
        """Release the model."""
        self.is_open = False
        self._buffers.forget()
        self._parameters.forget()
        self._state.forget()
        self._saved = SavedTensors()


class SavedTensors:
    """Copies of tensors from the beginning of a step; the next step reuses their memory.

    Of a sharded tensor, this member's part is copied.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._outlines: Sequence[object] = ()
        self._copy_by_id: dict[int, Tensor] = {}
        self._added: dict[int, tuple[Tensor, Tensor]] = {}
        self._constants: list[_ConstantCopy] = []

    @torch.no_grad()
    def begin(
        self, tensors: list[Tensor], *, spare: list[Tensor], constant: Sequence[Tensor]
    ) -> None:
        """Save tensors as a step begins.

        `spare`: copied to the host if a GPU has too little memory. `constant`: see `_ConstantCopy`.
        """
        self.end()
        wanted = [*tensors, *spare]
        parts = own_parts(wanted)
        outlines = list(map(_OUTLINE, parts))
        num_on_device = len(wanted if self._have_memory(spare) else tensors)
        if spare or not are_same(wanted, self._tensors) or outlines != self._outlines:
            self._copies = [
                self._memory_for(each, part, part.device if index < num_on_device else HOST)
                for index, (each, part) in enumerate(zip(wanted, parts, strict=True))
            ]
            self._tensors, self._outlines = wanted, outlines
            self._copy_by_id = dict(zip(map(id, wanted), self._copies, strict=True))
        foreach_copy_(self._copies[:num_on_device], parts[:num_on_device])
        copy_staged(self._copies[num_on_device:], parts[num_on_device:])
        kept = {id(each.tensor): each for each in self._constants}
        self._constants = [
            before
            if (before := kept.get(id(each))) is not None and before.is_valid()
            else _ConstantCopy(each)
            for each in constant
        ]

    def _have_memory(self, tensors: Sequence[Tensor]) -> bool:
        num_bytes: Counter[torch.device] = Counter()
        for each, part in zip(tensors, own_parts(tensors), strict=True):
            copy = self.copy_of(each)
            if part.is_cuda and (copy is None or not copy.is_cuda):
                num_bytes[part.device] += part.nbytes
        return all(
            needed <= torch.cuda.mem_get_info(device)[0] // PART_OF_FREE_MEMORY
            for device, needed in num_bytes.items()
        )

    def _memory_for(self, tensor: Tensor, part: Tensor, device: torch.device) -> Tensor:
        copy = self.copy_of(tensor)
        if copy is None or _OUTLINE(copy) != (part.shape, part.dtype, device):
            copy = torch.empty_like(part, device=device)
        return copy

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> None:
        """Save tensors within the step, except those that are saved already."""
        for each, part in zip(tensors, own_parts(tensors), strict=True):
            if not self.has(each):
                self._added[id(each)] = (each, part.clone())

    def has(self, tensor: Tensor) -> bool:
        """True if the tensor was saved in this step."""
        return id(tensor) in self._copy_by_id or id(tensor) in self._added

    def copy_of(self, tensor: object) -> Tensor | None:
        """Return the copy of this member's part of the tensor; None if it was not saved at the
        beginning.
        """
        return self._copy_by_id.get(id(tensor))

    def changed_constants(self) -> list[Tensor]:
        """Return the constant tensors whose contents differ from the copies."""
        return [each.tensor for each in self._constants if each.is_changed()]

    @torch.no_grad()
    def restore(self) -> None:
        """Write the copies back."""
        added = self._added.values()
        tensors = [*self._tensors, *(each for each, _ in added)]
        foreach_copy_(own_parts(tensors), [*self._copies, *(copy for _, copy in added)])
        for each in self._constants:
            each.restore()

    def end(self) -> None:
        """Free copies that were made within the step."""
        self._added.clear()


class _ConstantCopy:
    """Copy of a tensor that is seldom written, such as a mask.

    On a GPU a copy is reused until torch counts a write to the tensor. On the host it is made anew
    for each step: this also covers uncounted writes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copy = tensor.detach().clone()
        self._num_writes, self._address = num_writes(tensor), tensor.data_ptr()

    def _is_written(self) -> bool:
        return num_writes(self.tensor) != self._num_writes

    def is_changed(self) -> bool:
        return self._is_written() and not torch.equal(self.tensor, self._copy)

    def is_valid(self) -> bool:
        is_counted = not is_on_host(self.tensor) and not self.tensor.is_inference()
        return is_counted and not self._is_written() and self.tensor.data_ptr() == self._address

    def restore(self) -> None:
        if not self.is_valid():
            self.tensor.detach().copy_(self._copy)
