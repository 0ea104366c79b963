"""Memory of an asynchronous member's parameters: by name, and as bytes to send and fill."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.tied_tensors import refuse_hidden_ties
from shoal.state.host_copies import CopyUnderWay, copy_to_host, queued_work, side_by_side
from shoal_client.shards.blocks import Buffers
from shoal_proto.errors import DtypeMismatch, InvalidSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ParameterSlot:
    """A parameter's bytes for reading and writing: its own memory, or a copy on the host."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._pointer = 0
        self.staged: Tensor | None = None
        self._view = memoryview(b"")

    def bytes(self) -> memoryview:
        """Return the bytes of the parameter itself, or of `staged`."""
        data = self.parameter.detach()
        # The script may have moved the model since: then the parameter has another storage.
        if data.data_ptr() != self._pointer or not self._view.nbytes:
            in_place = data.is_cpu and data.is_contiguous()
            self.staged = None if in_place else side_by_side([data], pinned=data.is_cuda)[0]
            self._view = bytes_of(data if self.staged is None else self.staged)
            self._pointer = data.data_ptr()
        return self._view


class SharedValues:
    """The parameters that all members train, as held by one member."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raises InvalidSpec or DtypeMismatch for parameters that cannot be shared."""
        refuse_hidden_ties(model)
        trained = _trained(model, optimizer)
        self.parameters = {name: parameter for name, (parameter, _) in trained.items()}
        self.schema = [
            ParameterSpec(
                name=name,
                shape=parameter.shape,
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=group,
            )
            for name, (parameter, group) in trained.items()
        ]
        self._slots = {
            name: ParameterSlot(parameter) for name, parameter in self.parameters.items()
        }
        self._adopted = CopyUnderWay()

    def writable(self) -> Buffers:
        """Return buffers for new values; after writing to them, call `adopt`."""
        # A GPU may still be copying the last values from them.
        self._adopted.wait()
        return {name: slot.bytes() for name, slot in self._slots.items()}

    def present(self) -> Buffers:
        """Return the present values, to be read before the parameters change."""
        views = self.writable()
        staged = self._staged()
        copy_to_host([copy for copy, _ in staged], [own for _, own in staged]).wait()
        return views

    def copies(self) -> Buffers:
        """Return copies of the present values."""
        return {name: memoryview(bytes(view)) for name, view in self.present().items()}

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the written values into the parameters."""
        for copy, own in self._staged():
            own.copy_(copy, non_blocking=own.is_cuda)
        self._adopted = queued_work([own for _, own in self._staged()])

    def _staged(self) -> list[tuple[Tensor, nn.Parameter]]:
        slots = self._slots.values()
        return [(slot.staged, slot.parameter) for slot in slots if slot.staged is not None]


def _trained(model: nn.Module, optimizer: Optimizer) -> dict[str, tuple[nn.Parameter, int]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained: dict[str, tuple[nn.Parameter, int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(parameter)
            if name is None:
                raise InvalidSpec(
                    "the optimizer holds a parameter that is not the model's",
                    seen=f"a parameter of shape {tuple(parameter.shape)} in group {index}",
                    expected="parameters of the model that is distributed",
                    fix="Make the optimizer from model.parameters().",
                )
            if parameter.dtype not in DTYPES:
                raise DtypeMismatch(
                    f"parameter {name} has a dtype that no optimizer kernel takes",
                    seen=str(parameter.dtype),
                    expected=", ".join(map(str, DTYPES)),
                )
            trained[name] = (parameter, index)
    return trained


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
