"""What changes parameters and the optimizer's state within a step before the optimizer's step at
its end: updates of one of several optimizers, and what the script writes itself. Both are taken
back with a step that does not happen."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.model.gradients import is_on_host
from shoal.model.local_parts import local_part
from shoal.model.trained_parameters import are_same
from shoal.torch_private.dtensor import all_local
from shoal.torch_private.tensors import all_writes, foreach_copy_, num_writes

log = structlog.get_logger(__name__)

FIRST_STEPS = 3
"""Of each parameter on this member. In the first one a teacher that began as a copy moves nowhere,
and in the next one neither if the first had a learning rate of 0."""
EVERY_STEPS, NUM_TURNS = 4, 7
"""One in so many steps compares elements of one in so many parameters. A prime, as scripts do
things every so many steps."""
NUM_ELEMENTS = 4
"""At most so many of each."""
EVERY_STEPS_ON_GPU = 64
"""Where to compare is to wait."""


class EarlyUpdates:
    """Those of the step under way: what they change is kept as it was before the first of them."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity: what is held, and what was in it."""
        self._states: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
        self._state_tensors: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def keep(self, optimizers: Iterable[Optimizer], held: Iterable[Tensor]) -> None:
        """The optimizers are about to step, which changes the tensors that are held."""
        for optimizer in optimizers:
            if optimizer not in self._states:
                self._states[optimizer] = {
                    parameter: dict(state) for parameter, state in optimizer.state.items()
                }
                for state in self._states[optimizer].values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            self._state_tensors[id(value)] = (value, value.clone())
        for tensor in held:
            if id(tensor) not in self._tensors:
                own = local_part(tensor)
                self._tensors[id(tensor)] = (own, own.clone())

    @torch.no_grad()
    def restore(self) -> None:
        """The step does not happen."""
        for own, before in (*self._tensors.values(), *self._state_tensors.values()):
            own.copy_(before)
        for optimizer, states in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(states)
        self.forget()

    @property
    def of_state(self) -> Collection[int]:
        """The tensors that the optimizers had as state when they stepped, by identity."""
        return self._state_tensors.keys()

    def forget(self) -> None:
        """The step is committed, or begins."""
        self._tensors.clear()
        self._states.clear()
        self._state_tensors.clear()


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
        self._own = _OwnParts({})
        self._watch = _Watch({})
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
            self._parameters, self._own = parameters, _OwnParts(parameters)
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
        self._watch = _Watch({n: each for n, each in held.items() if n not in self._written})
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
        self._parameters, self._own, self._watch = {}, _OwnParts({}), _Watch({})
        self._copies, self._is_open, self._is_watched = {}, False, False


class StateWrites:
    """What a script writes to optimizers' state within a step: as one that begins anew without
    momentum, or keeps there what it perturbs weights from.

    What stands there when a step begins is put back. What is written to in place is copied as the
    step begins, once the script was seen to do so: by torch's count of writes. The first time that
    it does, it cannot be taken back.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        """What stood there when the step began."""
        self._contents: list[object] = []
        """All of that, one after the other."""
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._num_writes: list[int] = []
        """The tensors in it, what each is to its parameter, and how often they were written to."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity: a tensor, and what was in it."""
        self._written: set[str] = set()
        """What the script has written to in place. Over all generations."""
        self._is_open = self._are_counted = False
        self._kept: Collection[int] = ()
        """What has been copied within the step, by identity: before an optimizer stepped."""
        self.is_lost = False
        """Whether a tensor was written to in this step of which there is no copy."""

    def begin(self, optimizers: Collection[Optimizer]) -> None:
        """A step begins."""
        contents = _contents_of(optimizers)
        if not are_same(contents, self._contents):
            self._look(optimizers)
            self._contents = contents
        self._copies = self._copied() if self._written else {}
        self._is_open, self._kept, self.is_lost = True, (), False
        self._num_writes = self._counts()

    @torch.no_grad()
    def _copied(self) -> dict[int, tuple[Tensor, Tensor]]:
        pairs = zip(self._names, self._tensors, strict=True)
        return {id(each): (each, each.clone()) for name, each in pairs if name in self._written}

    def _look(self, optimizers: Iterable[Optimizer]) -> None:
        """Something else stands there than at the step before."""
        self._begun = [
            (each, {parameter: dict(state) for parameter, state in each.state.items()})
            for each in optimizers
        ]
        found = [
            (name, value)
            for _, states in self._begun
            for state in states.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        self._names, self._tensors = [name for name, _ in found], [each for _, each in found]
        self._are_counted = not any(each.is_inference() for each in self._tensors)

    def _counts(self) -> list[int]:
        if self._are_counted:
            return all_writes(self._tensors)
        return list(map(num_writes, self._tensors))

    def note(self) -> None:
        """What has changed by now the script has written."""
        if not self._is_open:
            return
        now = self._counts()
        if now == self._num_writes:
            return
        counts = zip(self._names, self._tensors, now, self._num_writes, strict=True)
        for name, tensor, count, before in counts:
            if count != before:
                self._written.add(name)
                has_copy = id(tensor) in self._copies or id(tensor) in self._kept
                self.is_lost = self.is_lost or not has_copy

    def updated(self, kept: Collection[int]) -> None:
        """Behind `note`, an optimizer has stepped within the step. `kept`: the tensors of its state
        that were copied before, by identity."""
        self._kept = kept
        self._num_writes = self._counts()

    def settle(self) -> None:
        """From here on the session changes the state, with a step that is then committed."""
        self.note()
        self._copies, self._is_open = {}, False

    @contextmanager
    def as_begun(self) -> Iterator[None]:
        """Within, the state is that which the step began with, unless it `is_lost`."""
        begun = self._begun if self._is_open else []
        present = [(each, dict(each.state)) for each, _ in begun]
        self._put(begun, self._copies)
        try:
            yield
        finally:
            self._put(present, {})

    @torch.no_grad()
    def restore(self) -> bool:
        """The step does not happen, and `note` has seen that; whether the state is as it was.
        Updates within the step are taken back already."""
        if not self._is_open:
            return True
        self._is_open = False
        for tensor, before in self._copies.values():
            tensor.copy_(before)
        self._put(self._begun, {})
        return not self.is_lost

    @staticmethod
    def _put(
        states: Iterable[tuple[Optimizer, Mapping[Tensor, dict[str, Any]]]],
        copies: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        for optimizer, state in states:
            optimizer.state.clear()
            for parameter, values in state.items():
                optimizer.state[parameter] = {
                    name: copies[id(value)][1] if id(value) in copies else value
                    for name, value in values.items()
                }

    def forget(self) -> None:
        """Let go of the optimizers' state."""
        self._begun, self._contents, self._names, self._tensors = [], [], [], []
        self._copies, self._is_open = {}, False


def _contents_of(optimizers: Iterable[Optimizer]) -> list[object]:
    """Optimizers, and what stands in their state, with its names."""
    contents: list[object] = []
    for each in optimizers:
        contents.append(each)
        for parameter, state in each.state.items():
            contents.append(parameter)
            contents += state
            contents += state.values()
    return contents


class _OwnParts:
    """What this member has of some parameters, in the memory that it has in this generation.

    Not what a module shows at the time: where parameters are gathered for a pass and freed behind
    it, that is memory that comes and goes.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        found = {name: each for name, each in parameters.items() if _is_plain(each)}
        cut = {name: each for name, each in found.items() if isinstance(each, DTensor)}
        whole = {name: each for name, each in found.items() if name not in cut}
        self.parameters: Mapping[str, Tensor] = {**whole, **cut}
        self._whole, self._cut = list(whole.values()), list(cut.values())
        self._counted = [*self._whole, *self._cut]
        self._names = [*whole, *cut, *cut]
        self._are_counted = not any(each.is_inference() for each in self._counted)

    def all(self) -> list[Tensor]:
        """Of each, as it is now: a script may have given it other memory."""
        return [*self._whole, *all_local(self._cut)] if self._cut else self._whole

    def present(self, names: Iterable[str]) -> list[Tensor]:
        """The same of these alone."""
        own = dict(zip(self.parameters, self.all(), strict=True))
        return [own[name] for name in names]

    def num_writes(self) -> list[int]:
        """So often they were written to."""
        if not self._are_counted:
            return list(map(num_writes, self._counted))
        own = all_writes(self._counted)
        # Of a part, what is done to the whole is counted apart from what is done to the part.
        return own + all_writes(all_local(self._cut)) if self._cut else own

    def differing(self, one: Sequence[int], other: Sequence[int]) -> set[str]:
        """Names of those that these numbers differ for."""
        counts = zip(self._names, one, other, strict=False)
        return {name for name, before, now in counts if before != now}


def _is_plain(parameter: Tensor) -> bool:
    """Whether it has elements in memory, and not what it is computed from: quantised weights."""
    wraps = hasattr(parameter, "__tensor_flatten__") and not isinstance(parameter, DTensor)
    return parameter.layout is torch.strided and not wraps


class _Watch:
    """Finds the parameters that were written to since `mark`.

    torch counts writes, but for those by way of `.data` and by `torch._foreach` functions to
    DTensors. So some elements are compared too: in a step those of some parameters, and of all
    whenever it has to be known (`closely`). Where that is to wait for a GPU, in few steps.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._own = _OwnParts(parameters)
        alike: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, own in zip(self._own.parameters, self._own.all(), strict=True):
            alike.setdefault((own.device, own.dtype), {})[name] = self._own.parameters[name]
        self._samples = [_Samples(each) for each in alike.values()]
        self._num_writes: list[int] = []
        self._num_steps = 0

    def mark(self) -> None:
        """What is written from here on is found."""
        self._num_steps += 1
        self._num_writes = self._own.num_writes()
        for samples in self._samples:
            samples.mark()

    def changed(self, *, closely: bool) -> set[str]:
        """Names of those that were."""
        found: set[str] = set()
        now = self._own.num_writes()
        if now != self._num_writes:
            found = self._own.differing(now, self._num_writes)
        if closely or self._num_steps % EVERY_STEPS == 0:
            for samples in self._samples:
                found |= samples.changed(self._turn(samples, closely=closely))
        return found

    def _turn(self, samples: "_Samples", *, closely: bool) -> slice:
        """Which of them are compared."""
        num, every = samples.num, EVERY_STEPS_ON_GPU if samples.waits else EVERY_STEPS
        turn, rest = divmod(self._num_steps, every)
        if closely or rest:
            return slice(0, num if closely else 0)
        turn %= NUM_TURNS
        return slice(turn * num // NUM_TURNS, (turn + 1) * num // NUM_TURNS)


class _Samples:
    """Some elements of parameters of one dtype and device, and where they lie."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._own = _OwnParts(parameters)
        self._names = list(self._own.parameters)
        self._places = [each.data_ptr() for each in self._own.all()]
        self._views = [_elements(own) for own in self._own.all()]
        self._ends = [0, *accumulate(view.numel() for view in self._views)]
        self._before = torch.cat(self._views)
        self.waits = not all(map(is_on_host, self._views))
        """Whether to compare them is to wait for a GPU."""

    def mark(self) -> None:
        """They were as they are now."""
        torch.cat(self._views, out=self._before)

    @property
    def num(self) -> int:
        """Of so many parameters."""
        return len(self._names)

    def changed(self, turn: slice) -> set[str]:
        """Names of those among these that are others."""
        names, views, known = self._names[turn], self._views[turn], self._places[turn]
        if not names:
            return set()
        places = [each.data_ptr() for each in self._own.all()[turn]]
        found = {n for n, one, other in zip(names, places, known, strict=True) if one != other}
        now, before = torch.cat(views), self._before[self._ends[turn.start] : self._ends[turn.stop]]
        if not now.equal(before):
            parts = torch.split(before, [view.numel() for view in views])
            pairs = zip(names, views, parts, strict=True)
            found |= {name for name, view, part in pairs if not _have_same_bits(view, part)}
        return found


def _elements(own: Tensor) -> Tensor:
    """A view of some of them: side by side, as others take four times as long to put together."""
    held = own.detach()
    if not held.numel():
        return held.reshape(-1)
    pairs = zip(held.shape, held.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    count = min(NUM_ELEMENTS, extent)
    return held.as_strided((count,), (1,), held.storage_offset() + (extent - count) // 2)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike equality, also where they are no numbers."""
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
