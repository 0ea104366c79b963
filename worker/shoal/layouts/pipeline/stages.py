"""Stage of a model that one rank of a pipeline holds and runs."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from shoal.layouts.pipeline.outline import Outline, is_used, paths_of, uses_of
from shoal.layouts.pipeline.pass_buffers import PassBuffers
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.torch_private.compiling import (
    compile_alike,
    compiled_alike,
    compiled_call,
)
from shoal.torch_private.modules import (
    buffer_table,
    child_table,
    parameter_table,
    transient_buffers,
)
from shoal_proto.errors import InvalidSpec


class Stage:
    """Stage of a model: the user's module without the other stages' parts, and functions to run
    it."""

    pass_buffers: PassBuffers
    """Set once the module has its memory."""

    def __init__(
        self,
        model: nn.Module,
        outline: Outline,
        stage_of: Sequence[int],
        index: int,
        *,
        is_trained: bool = True,
    ) -> None:
        """Take ownership of the model, and delete the parts that this stage does not need.

        The first stage keeps the parts that no stage uses. Raises InvalidSpec if the stage
        `is_trained` and two stages would hold the same persistent buffer.
        """
        self.index, self.num_stages = index, stage_of[-1] + 1
        self.model = model
        modes = (True, False)
        self._functions = {mode: outline.function(mode, stage_of, index) for mode in modes}
        self._called = {mode: _called(outline.graph(mode, stage_of, index)) for mode in modes}
        self._runs: dict[tuple[bool, Any], Callable[..., Any]] = {}
        self._inputs = outline.parameters
        self._signature = inspect.signature(model.forward)
        uses = [
            uses_of(outline.graph(True, stage_of, stage))
            | uses_of(outline.graph(False, stage_of, stage))
            for stage in range(self.num_stages)
        ]
        self.holders = _holders(model, uses)
        """Stages that hold a parameter or buffer, by its name."""
        if is_trained:
            _refuse_shared_buffers(model, uses)
        own = uses[index] | (_unused(model, uses) if index == 0 else set())
        self.names = _own_names(model, own)
        _prune(model, own)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of this stage, by their names in the user's model."""
        return {
            self.names[name]: parameter
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers of this stage, by their names in the user's model."""
        return {self.names[name]: buffer for name, buffer in persistent_buffers(self.model).items()}

    def run(self, inputs: Mapping[str, Any], activations: Sequence[Tensor]) -> Any:
        """Run this stage's forward pass; return a tuple for the next stage, or the outputs."""
        mode = self.model.training
        key = mode, compiled_call(self.model)
        if key not in self._runs:
            self._runs[key] = self._function(mode)
        return self._runs[key](self.model, *inputs.values(), *activations)

    def _function(self, mode: bool) -> Callable[..., Any]:
        _compile_called(self.model, self._called[mode])
        function = self._functions[mode]
        return compiled_alike(self.model, function) if compiled_call(self.model) else function

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind the arguments of a call of the model to names, as `run` takes them. Raises
        InvalidSpec for inputs that the trace lacks: values other than the defaults it has fixed,
        and values of `*args` and `**kwargs`."""
        bound = self._signature.bind(*args, **kwargs).arguments
        given = {}
        for name, default in self._inputs.items():
            if default is inspect.Parameter.empty:
                given[name] = bound.pop(name)
            elif not _is_same(bound.pop(name, default), default):
                raise _no_input(f"{name}={default!r}", f"another value for {name}")
        for name, values in bound.items():
            if isinstance(values, dict):
                raise _no_input(f"no values in **{name}", ", ".join(values))
            raise _no_input(f"no values in *{name}", f"{len(values)} values")
        return given


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, Tensor) and bool(value == default))


def _no_input(laid_out_for: str, seen: str) -> InvalidSpec:
    return InvalidSpec(
        f"the pipeline was laid out for {laid_out_for}",
        seen=seen,
        expected="values only for the first input and for inputs without a default",
    )


def _called(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_module"}


def _compile_called(model: nn.Module, names: Collection[str]) -> None:
    """Compile the called modules within each compiled module that the trace enters: the compiled
    module itself is never called."""
    for name in names:
        called = model.get_submodule(name)
        above = [model.get_submodule(path) for path in paths_of(name)][:-1]
        compiled = [part for part in above if compiled_call(part)]
        if compiled and not compiled_call(called):
            compile_alike(compiled[-1], called)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _stages_of(tensor: str, uses: Sequence[Collection[str]]) -> list[int]:
    return [stage for stage, used in enumerate(uses) if is_used(tensor, used)]


def _holders(model: nn.Module, uses: Sequence[Collection[str]]) -> dict[str, tuple[int, ...]]:
    canonical = _canonical(model)
    holders: dict[str, set[int]] = {}
    for name, _ in _tensors(model):
        holders.setdefault(canonical[name], set()).update(_stages_of(name, uses))
    return {name: tuple(sorted(stages)) or (0,) for name, stages in holders.items()}


def _unused(model: nn.Module, uses: Sequence[Collection[str]]) -> set[str]:
    canonical = _canonical(model)
    used = {canonical[name] for name, _ in _tensors(model) if _stages_of(name, uses)}
    return {name for name in canonical.values() if name not in used}


def _canonical(model: nn.Module) -> dict[str, str]:
    further = tied(model)
    return {name: further.get(name, name) for name, _ in _tensors(model)}


def _own_names(model: nn.Module, own: Collection[str]) -> dict[str, str]:
    return {name: known for name, known in _canonical(model).items() if is_used(name, own)}


def _refuse_shared_buffers(model: nn.Module, uses: Sequence[Collection[str]]) -> None:
    canonical = _canonical(model)
    keepers: dict[str, tuple[str, set[int]]] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        for buffer in buffer_table(part):
            name = f"{path}.{buffer}" if path else buffer
            if name not in canonical or buffer in transient_buffers(part):
                continue
            first, stages = keepers.setdefault(canonical[name], (name, set()))
            stages.update(_stages_of(path, uses))
            if len(stages) > 1:
                raise _kept_by_several(first, name)


def _kept_by_several(first: str, name: str) -> InvalidSpec:
    what = f"{name.rpartition('.')[0]} is called by more than one stage and keeps a buffer"
    if first != name:
        what = f"{first} and {name} are one buffer, kept by layers of more than one stage"
    return InvalidSpec(
        what,
        seen=name,
        expected="a layer with buffers, such as BatchNorm, in one stage only",
        fix="Use a layer with its own buffer for each call, or a split_at= that leaves all calls in"
        " one stage. A constant may be shared if it is registered with persistent=False.",
    )


def _prune(model: nn.Module, own: Collection[str]) -> None:
    paths = list(model.named_modules(remove_duplicate=False))
    kept = {
        (part, name)
        for path, part in paths
        for name in (*parameter_table(part), *buffer_table(part))
        if is_used(f"{path}.{name}" if path else name, own)
    }
    for part in model.modules():
        for table in (parameter_table(part), buffer_table(part)):
            for name in table:
                if (part, name) not in kept:
                    table[name] = None
    needed = {above for name in own for above in paths_of(name)}
    for path, _ in reversed(paths):
        parent, _, name = path.rpartition(".")
        if path and path not in needed and not is_used(path, own):
            del child_table(model.get_submodule(parent))[name]
