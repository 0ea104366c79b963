"""`shoal.distribute` without a session: a fixed set of ranks that torchrun or mpiexec starts.

The strategy does its work in the forward pass and in hooks on the optimizer's step.
"""

import atexit
import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.backends.choice import init_static_world
from shoal.backends.network import retired
from shoal.backends.process_group.transports import is_gloo
from shoal.layouts.base import Layout, LossFunction, World
from shoal.layouts.clipping import clip
from shoal.layouts.optimizer_binding import MetaModel, OptimizerBinding
from shoal.model.devices import device_of
from shoal.model.frameworks import adapter_of, as_torch, is_trained_by_fit
from shoal.model.initialisation import refuse_lazy
from shoal.model.module_proxy import copy_modes, proxy_of, retarget
from shoal.model.tied_tensors import give_own_memory
from shoal.state.resharding import reshard
from shoal.strategies import find_strategy
from shoal.strategies.base import Strategy
from shoal.strategies.compiled_models import in_place
from shoal.strategies.layout.strategy import LayoutStrategy
from shoal.torch_private.c10d import all_groups
from shoal.torch_private.watching import before_calls
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_number

_MARK = "_shoal_static"


class FixedRanksTraining:
    """A model laid out over a fixed set of ranks."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strategy: Strategy) -> None:
        meta_model = MetaModel(model, optimizer)
        group = dist.group.WORLD
        assert group is not None, "init_static_world made the group"
        world = World(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=device_of(model),
            group=group,
        )
        self.layout = make_layout(strategy, meta_model, optimizer, world)
        self._binding = OptimizerBinding(meta_model, optimizer, self.layout)
        held = [meta_model.initial()] if world.rank == 0 else []
        self._binding.fill(reshard(group, held, self._binding.needed_chunk))
        self.model = proxy_of(model, self._route)
        self.model.__dict__[_MARK] = self
        copy_modes(self.model, self.layout.plain)
        retarget(self.model, self.layout.plain)
        meta_model.forget_weights()
        self._begun = self._reduced = False
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        for owner in (optimizer, self.model):
            vars(owner)["zero_grad"] = self._forgetting(owner.zero_grad)
        vars(optimizer)[_MARK] = self
        for call in ("unscale_", "step"):
            before_calls(torch.amp.GradScaler, call, _look_at_scaler, mark=_MARK)
        if is_gloo(group):
            _free_at_exit(self)

    def _route(self) -> nn.Module:
        if not torch.is_grad_enabled():
            return self.layout.plain
        self._begin()
        return self.layout.module

    def _begin(self) -> None:
        if not self._begun:
            self._begun, self._reduced = True, False
            self.layout.begin()

    def _reduce(self) -> None:
        if not self._reduced:
            self.layout.reduce()
            self._reduced = True

    def _before_step(self, *_: Any) -> None:
        self._reduce()

    def _after_step(self, *_: Any) -> None:
        self.layout.share_buffers()
        self.layout.stepped()
        self._begun = False

    def _forgetting(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """Return a `zero_grad` after which the next step has only the gradients of later passes,
        also if the script has left out an optimizer's step."""

        @functools.wraps(zero_grad)
        def forgetting(*args: Any, **kwargs: Any) -> None:
            zero_grad(*args, **kwargs)
            self._reduced = False
            self.layout.forget_gradients()

        return forgetting

    def check_scaler(self) -> None:
        """Raise InvalidSpec for a GradScaler if ranks hold different gradients."""
        if self.layout.is_replicated or self.layout.world.world_size == 1:
            # The scaler looks for overflows itself, in the same gradients on every rank.
            self.layout.looks_for_faults = False
        else:
            raise InvalidSpec(
                "a GradScaler of the script's own, under a strategy that spreads gradients",
                seen="scaler.unscale_(optimizer) or scaler.step(optimizer), which sees only this"
                " rank's part of the gradients: ranks would skip different steps",
                expected='bfloat16, which needs no scaling; strategy "ddp"; or a session, with'
                ' session.register("scaler", scaler)',
            )

    def release_groups(self) -> list[dist.ProcessGroup]:
        """Drop all references to the groups, and return the groups."""
        groups = [self.layout.world.group, *self.layout.groups()]
        self.layout.release()
        del self.layout, self._binding
        return groups

    def forward_backward(self, inputs: Any, targets: Any, loss_function: LossFunction) -> Tensor:
        self._begin()
        return self.layout.forward_backward(inputs, targets, loss_function, 1.0)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        self._reduce()
        return clip(self.layout, max_norm)

    def state_dict(self) -> dict[str, Tensor]:
        return self._binding.whole_model(0, self.layout.world.group)


_trainings: weakref.WeakSet[FixedRanksTraining] = weakref.WeakSet()


def _look_at_scaler(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, *_: object, **__: object
) -> None:
    training = vars(optimizer).get(_MARK)
    if isinstance(training, FixedRanksTraining) and scaler.is_enabled():
        training.check_scaler()


def _free_at_exit(training: FixedRanksTraining) -> None:
    """Free the training's groups when the process ends.

    After a collective, a Gloo thread frees its tensors under Python's lock. If the interpreter ends
    meanwhile, the process aborts with SIGABRT (torch 2.13). `destroy_process_group()` does not free
    a group that a model refers to.
    """
    # Registered again, to run before all functions registered so far, such as waits for groups.
    atexit.unregister(_free_groups)
    atexit.register(_free_groups)
    _trainings.add(training)


def _free_groups() -> None:
    groups = [group for training in list(_trainings) for group in training.release_groups()]
    if dist.is_initialized():
        groups += all_groups()
        dist.destroy_process_group()
    # Modules and their layouts are in reference cycles.
    gc.collect()
    retired.retire(groups)


def make_layout(
    strategy: Strategy, meta_model: MetaModel, optimizer: Optimizer, world: World
) -> Layout:
    """Return the layout of a strategy over a fixed set of ranks.

    Raises InvalidSpec for a strategy that needs a session, or the strategy's own refusal.
    """
    if isinstance(strategy, LayoutStrategy):
        strategy.check_layers(meta_model.model, optimizer)
        strategy.check(meta_model.model, optimizer)
        return strategy.lay_out(meta_model.copy(), world)
    raise InvalidSpec(
        f"strategy {strategy.name} needs a session",
        seen="shoal.distribute() without one",
        expected="with shoal.join(...) as session: session.distribute(...)",
    )


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: str | Strategy = "ddp",
    *,
    backend: str | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Return the model and optimizer to train with on all ranks that torchrun or mpiexec started.

    Every rank must call `distribute` with the same model, and gets the weights of rank 0. The loss
    of a rank ends the job; for elastic training use `shoal.join`.

    The training loss must be a mean over a rank's own samples, and every rank must have the same
    number of samples. Under "tensor" and "pipeline" all ranks must have the same samples, under
    "fsdp-tensor" and "hybrid" the ranks of a group: see `data_share`. A compiled Keras model with
    its own optimizer still trains by `fit`: see `shoal.integrations.keras`. `backend`: "gloo",
    "nccl" or "mpi"; None: "mpi" under mpiexec, else "nccl" if CUDA is available, else "gloo".

    Raises UnknownStrategy, InvalidSpec, or the error with which the strategy refuses the model or
    the optimizer.
    """
    if is_trained_by_fit(model, optimizer):
        return adapter_of(model).distribute_static(model, strategy, backend), optimizer
    chosen = find_strategy(strategy)
    model = as_torch(in_place(model))
    refuse_lazy(model)
    give_own_memory(model)
    init_static_world(backend)
    return FixedRanksTraining(model, optimizer, chosen).model, optimizer


def forward_backward(
    model: nn.Module, inputs: Any, targets: Any, loss_function: LossFunction
) -> Tensor:
    """Run forward and backward in one call, as strategies with a pipeline require.

    Returns the mean loss, detached. Raises InvalidSpec for a model that `shoal.distribute` did not
    return, as do `clip_grad_norm`, `state_dict` and `data_share`. Call `optimizer.step()`
    afterwards.
    """
    return _static(model).forward_backward(inputs, targets, loss_function)


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients of a distributed model to a total 2-norm of at most `max_norm`.

    Returns the norm before scaling. Collective; called between backward and `optimizer.step()`.
    """
    return _static(model).clip_grad_norm(as_number("max_norm", max_norm))


def state_dict(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the whole state_dict of a distributed model, on the host, to each rank. Collective."""
    return _static(model).state_dict()


def data_share(model: nn.Module) -> tuple[int, int]:
    """Return the index of this rank's share of each batch, and the number of shares."""
    layout = _static(model).layout
    return layout.data_index, layout.data_count


def _static(model: nn.Module) -> FixedRanksTraining:
    training = model.__dict__.get(_MARK)
    if not isinstance(training, FixedRanksTraining):
        raise InvalidSpec(
            "this model was not distributed",
            seen=type(model).__name__,
            expected="the model that shoal.distribute returned",
        )
    return training
