"""The steps of the strategies whose members compute with a layout.

All synchronous strategies do so, except `local-sgd` and `diloco`. `LayoutStrategy` has the order of
passes, votes, reduction, checks, update and commit.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.data.order import Order
from shoal.layouts import local_step
from shoal.layouts.base import Layout, LossFunction, World
from shoal.layouts.clipping import clip, scale
from shoal.layouts.gradients import not_reduced
from shoal.layouts.non_finite_check import NonFiniteCheck
from shoal.layouts.several import SeveralLayouts
from shoal.membership.generation import Generation
from shoal.model.devices import device_of
from shoal.model.digests import optimizer_digest, schema_digest
from shoal.model.elementwise_optimizers import refuse_further_state, refuse_lbfgs
from shoal.model.gradients import StepGradients, is_on_host, refuse_layers, refuse_parameter_hooks
from shoal.model.losses import check_loss
from shoal.model.several import SeveralModels, proxies_of
from shoal.model.trained_parameters import refuse_extra_state
from shoal.strategies.compiled_models import not_compiled
from shoal.strategies.synchronous.loss_scale import reduce_found_inf
from shoal.strategies.synchronous.step_vote import OptimizerAction
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal.torch_private.compiling import is_routing_compiled
from shoal_proto.errors import GenerationBroken, InvalidSpec


class LayoutBinding(Protocol):
    """A layout, with the parameters and gradients of this member."""

    @property
    def layout(self) -> Layout: ...

    @property
    def held_parameters(self) -> Mapping[str, Tensor]:
        """All parameters as this member holds them: the same mapping in all steps."""

    @property
    def gradients(self) -> StepGradients:
        """The gradients to drop as a step begins."""


class LayoutStrategy(SynchronousStrategy):
    """A synchronous strategy defined by how it lays a model over the ranks of a generation.

    A subclass sets `_binding` in `_bring_up`, and clears it in `_release_training`.
    """

    carries = True
    changes_batch_size = True

    def __init__(self) -> None:
        super().__init__()
        self._binding: LayoutBinding | None = None
        self._begun = self._reduced = False

    # --- for subclasses ---

    @abstractmethod
    def lay_out(self, model: nn.Module, world: World) -> Layout:
        """Lay the model out for a new generation. See `shoal.layouts.base.LayOut`."""

    @abstractmethod
    def _keep_model(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Keep what the generations need of the model and the optimizer."""

    def check(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise an error if the strategy cannot train this model with this optimizer."""

    def options(self) -> Mapping[str, str]:
        """Options that all members must have in common, for the proposal."""
        return {}

    def _refuse_weights(self) -> None:
        """Raise InvalidSpec if losses cannot have weights of their own."""

    def _before_first_pass(self) -> None:
        """Called once in each step, before its first forward pass."""

    def _check_buffers(self) -> None:
        """Raise InvalidSpec if passes have changed buffers that must not change in a step."""

    @abstractmethod
    def _committed(self) -> None:
        """Inspect the optimizer's state after a committed step: see `StateInspection`."""

    # --- before any generation ---

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_further_state(self.name, optimizer)
        refuse_extra_state(model)
        self.check_layers(model, optimizer)
        self._keep_model(model, optimizer)
        self.check(model, optimizer)
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "backend": self._backend.name,
            **self.options(),
        }
        self._device = device_of(model)
        self._model, self._optimizer = model, optimizer
        self._registered.follow(optimizer)
        self._transaction.train(model, optimizer)
        self._proxy = proxies_of(model, self._module_of)
        return self._proxy, optimizer

    def check_layers(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise an error for optimizers, layers and hooks with which several ranks would train
        another model than one process. Needs no session."""
        refuse_lbfgs(self.name, optimizer)
        refuse_layers(self.name, model)
        refuse_parameter_hooks(model)

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def trains_on(self, samples: Mapping[str, str], order: Order) -> None:
        # Check before the parameters of a layout replace the script's own.
        refuse_parameter_hooks(self._model)
        super().trains_on(samples, order)

    # --- generations ---

    def _world(self, generation: Generation, group: dist.ProcessGroup) -> World:
        return World(
            rank=generation.rank,
            world_size=generation.world_size,
            device=self._device,
            group=group,
            generation=generation.number,
            kept_regions=self._generation_group.kept_regions,
            completes_passes=True,
            makes_passes=True,
            exchanges=self.position.exchanges,
        )

    def _lay_out_all(self, model: nn.Module, world: World) -> Layout:
        if not isinstance(model, SeveralModels):
            return self.lay_out(model, world)
        layouts: dict[str, Layout] = {}
        try:
            for name, each in model.items():
                layouts[name] = self.lay_out(each, world)
        except BaseException:
            for layout in layouts.values():
                layout.release()
            raise
        return SeveralLayouts(model, layouts, world)

    # --- steps ---

    @property
    def local_model(self) -> nn.Module:
        return self._layout().plain

    @property
    def module(self) -> nn.Module:
        return self._module_of("")

    def _module_of(self, name: str) -> nn.Module:
        if is_routing_compiled() and not self.compiles:
            raise not_compiled(self.name, name)
        layout = self._layout()
        if isinstance(layout, SeveralLayouts):
            layout = layout.layouts[name]
        if not self._transaction.in_step or not torch.is_grad_enabled():
            return layout.plain
        self._begin()
        votes = self._transaction.votes
        votes.exchange_parts()
        if layout.communicates_in_forward(is_first_step=votes.is_first_step):
            votes.announce()
        return layout.module

    def _layout(self) -> Layout:
        if self._binding is None:
            raise InvalidSpec(
                f"a model of strategy {self.name} has no weights outside a generation",
                expected="forward passes on all members, from the first batch on",
            )
        return self._binding.layout

    def _bound(self) -> LayoutBinding:
        if self._binding is None:
            raise GenerationBroken(f"step {self.step} was begun outside any generation")
        return self._binding

    def begin_step(self) -> None:
        binding = self._bound()
        layout = binding.layout
        binding.gradients.forget()
        layout.step = self.step
        layout.looks_for_faults = self._registered.scaler is None
        self._open_step(layout.open(), binding.held_parameters)
        self._begun = self._reduced = False

    def _begin(self) -> None:
        """Begin the layout's step at the first forward pass, which then raises errors of the
        group.
        """
        if not self._begun:
            self.position.check_batch()
            self._begun = True
            self._before_first_pass()
            self._layout().begin()

    def _reduce_in_backward(self, reduces: bool) -> None:
        self._layout().reduce_in_backward(reduces)

    def backward(self, loss: Tensor, weight: float) -> None:
        layout = self._layout()
        waits = not is_on_host(loss)
        if layout.looks_for_faults and not waits:
            check_loss(loss, self.step)
        with self._transaction.weighted_backward():
            self._activate(self._transaction.chosen)
            if layout.looks_for_faults and waits:
                layout.note_loss(loss)
            layout.backward(loss, weight)

    def _activate(self, optimizers: frozenset[str]) -> Layout:
        layout = self._layout()
        if isinstance(layout, SeveralLayouts):
            layout.active = self._transaction.models(optimizers)
        return layout

    def update(self) -> None:
        if self._transaction.training is None:
            super().update()
        optimizers = self._transaction.take("session.update")
        layout = self._gradients_of(optimizers)
        self._transaction.agree_on(OptimizerAction.UPDATE)
        self._generation_group.check()
        stepped = self._transaction.models(optimizers)
        held = [t for name, t in layout.held.items() if name.partition(".")[0] in stepped]
        with self._transaction.updating(self._optimizer, held):
            local_step.step(self._optimizer)
            layout.updated()

    def _gradients_of(self, optimizers: frozenset[str]) -> SeveralLayouts:
        layout = self._activate(optimizers)
        assert isinstance(layout, SeveralLayouts), "only several optimizers are updated early"
        layout.reduce()
        if not layout.synchronised():
            raise not_reduced(self.step, layout.unreached, type(self).__name__)
        layout.check()
        return layout

    def backward_by_weight(self, loss: Tensor, weight: float) -> None:
        self._refuse_weights()
        self.backward(loss, self._transaction.add_weight(weight))

    def _scale_gradients(self, factor: float) -> None:
        scale(self._layout(), factor)

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        self._begin()
        layout = self._layout()

        def noted(outputs: Any, expected: Any) -> Tensor:
            loss = loss_function(outputs, expected)
            if layout.looks_for_faults and not is_on_host(loss):
                layout.note_loss(loss)
            return loss

        given = loss_function if layout.shares_loss else noted
        with self._transaction.weighted_backward():
            loss = layout.forward_backward(inputs, targets, given, weight)
        if layout.looks_for_faults and (layout.shares_loss or is_on_host(loss)):
            check_loss(loss, self.step)
        return loss

    def _reduce(self) -> Layout:
        layout = self._activate(self._transaction.due)
        if not self._reduced:
            check = layout.non_finite_check
            if check is None:
                self._transaction.votes.propose(idle=layout.names_without_gradient())
            else:
                # Vote first: a reduction waits for all members, and some may never reach it.
                self._settle_with(check, layout)
            with self._generation_group.judging():
                layout.reduce()
            self._reduced = True
        return layout

    def _settle_with(self, check: NonFiniteCheck, layout: Layout) -> None:
        votes = self._transaction.votes
        may_vote = layout.faults_are_own and layout.looks_for_faults
        # No vote is possible if the gradients of weighted losses still have to be scaled.
        if not may_vote or votes.weights.are_own:
            votes.propose(idle=layout.names_without_gradient())
            self._settle()
            return
        check.scan(layout.parameters)
        votes.propose(is_faulty=check.is_own, idle=layout.names_without_gradient())
        self._settle()
        check.note_faults(votes.faults)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._transaction.training is not None:
            return self._clip_chosen(max_norm)
        layout = self._layout()
        if not layout.is_replicated:
            # The norm is exchanged: a member that never gets here would keep the others waiting.
            self._reduce()
            self._settle()
        elif self._transaction.has_own_weights or self._registered.scaler is not None:
            # Gradients are weighted sums, not means, until the vote has shown all losses' weights.
            self._settle()
        self._transaction.votes.reopen()
        return clip(layout, max_norm)

    def _clip_chosen(self, max_norm: float) -> Tensor:
        layout = self._gradients_of(self._transaction.take("session.clip_grad_norm"))
        self._transaction.agree_on(OptimizerAction.CLIP)
        own = {id(each) for each in self._transaction.parameters(self._optimizer)}
        among = [name for name, each in layout.parameters.items() if id(each) in own]
        return clip(layout, max_norm, among)

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        self._bound()
        self._transaction.check_weighted()
        self._check_buffers()
        layout = self._reduce()
        if not layout.synchronised():
            raise not_reduced(self.step, layout.unreached, type(self).__name__)
        overflowed = False
        if layout.looks_for_faults:
            with self._generation_group.judging():
                layout.check()
        else:
            overflowed = layout.overflowed()
            if not layout.is_replicated:
                overflowed = reduce_found_inf(overflowed, self.group, self._device)
        self._settle()
        # Share before the optimizer steps: a failure here leaves the state of the last step.
        self._transaction.snapshot.settle_buffers()
        layout.share_buffers()
        self._generation_group.check()
        with self._transaction.committing(self._optimizer, overflowed=overflowed):
            if not overflowed:
                local_step.step(self._optimizer)
            layout.stepped()
            if layout.exchanges_updates:
                # Half an update is not a valid state.
                self._generation_group.check()
        self._committed()
        self._checkpoint()
        acknowledged()

    def finish_passes(self) -> None:
        self._layout().finish_passes()

    def data_share(self, generation: Generation) -> tuple[int, int]:
        layout = self._layout()
        return layout.data_index, layout.data_count
