"""Distributed model and optimizer of a session, with registered state and options."""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypedDict

import structlog
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.backends.choice import backend_for
from shoal.backends.network.own_gpu import LocalRank, check_gpu
from shoal.checkpoint.background import Checkpoints
from shoal.data.batch_options import fields_of
from shoal.data.content import content_fields
from shoal.data.order import Order
from shoal.data.share_sizes import ShareSizes
from shoal.layouts.synced_batchnorm import (
    has_sync_batchnorm,
    sync_batchnorm,
    unsync_batchnorm,
)
from shoal.membership.join_config import MAX_MEMBERS
from shoal.membership.validators import ValidatorSet
from shoal.model.devices import device_of, devices_of
from shoal.model.digests import listings_of
from shoal.model.frameworks import as_torch
from shoal.model.initialisation import initialise, refuse_lazy, refuse_reused
from shoal.model.other_parameters import references
from shoal.model.several import (
    Training,
    check_kinds,
    joined,
    models_of,
    optimizers_of,
    refuse_wrapped,
)
from shoal.model.tied_tensors import give_own_memory
from shoal.model.trained_parameters import TrainedParameters
from shoal.randomness.dropout import key_dropout, unkey_dropout, with_dropout_within
from shoal.session.elastic_controller import ElasticController
from shoal.session.script_calls import SchedulerWatch, ScriptCalls
from shoal.session.step_guard import StepGuard
from shoal.state.registered.objects import RegisteredState, Stateful, enabled_scaler
from shoal.strategies.base import Strategy
from shoal.strategies.compiled_models import in_place
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

_KNOWN_SCALERS = (torch.amp.GradScaler, torch.cuda.amp.GradScaler)

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Chosen = str | Strategy
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


class DistributeKeywords(TypedDict, total=False):
    """Keywords of `Session.distribute`."""

    checkpoints: Checkpoints | None
    keyed_dropout: bool
    sync_batchnorm: bool


@dataclass(frozen=True, kw_only=True)
class DistributeOptions:
    """Options of `Session.distribute`."""

    local_rank: LocalRank
    backend: str
    validators: ValidatorSet
    checkpoints: Checkpoints | None
    keyed_dropout: bool
    sync_batchnorm: bool
    in_step: Callable[[], bool]


class LongLivedObjects:
    """Objects of one session's process that Python's garbage collector skips. Otherwise a full
    collection, which takes 0.2 s, would begin in a bring-up."""

    def __init__(self) -> None:
        self._is_frozen = False

    def freeze(self) -> None:
        """Let the collector skip all present objects. No effect if objects are frozen already, or
        the collector is off."""
        if gc.isenabled() and not gc.get_freeze_count():
            # Collected first: garbage that is frozen stays until `release`.
            gc.collect(1)
            gc.freeze()
            self._is_frozen = True

    def release(self) -> None:
        """Unfreeze all objects. May be called twice."""
        if self._is_frozen:
            gc.unfreeze()
        self._is_frozen = False


class Distribution:
    """Model, optimizer, registered state and proposal fields of one session. `release` undoes
    changes to the script's objects."""

    def __init__(self, controller: ElasticController) -> None:
        self._controller = controller
        self.fields: dict[str, str] = {}
        """Fields of the proposal: values that must be the same on all members."""
        self.registered = RegisteredState()
        self.training: Training | None = None
        """Models of each optimizer; None for a single model and optimizer, neither in a list or
        dict."""
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self._guard: StepGuard | None = None
        self._parameters: TrainedParameters | None = None
        self._held = ExitStack()

    def distribute(
        self,
        model: Models,
        optimizer: Optimizers,
        chosen: Strategy,
        options: DistributeOptions,
    ) -> tuple[Any, Any]:
        """See `Session.distribute`."""
        try:
            with ExitStack() as held:
                distributed = self._distribute_all(model, optimizer, chosen, options, held)
                self._held = held.pop_all()
        except BaseException:
            # The script may try another strategy or model.
            self.fields.clear()
            self.training = self._optimizer = self._guard = self._parameters = None
            self._controller.drop_strategy()
            chosen.close()
            raise
        return distributed

    def _distribute_all(
        self,
        model: Models,
        optimizer: Optimizers,
        chosen: Strategy,
        options: DistributeOptions,
        held: ExitStack,
    ) -> tuple[Any, Any]:
        if isinstance(model, nn.Module) and isinstance(optimizer, Optimizer):
            return self._distribute(as_torch(in_place(model)), optimizer, chosen, options, held)
        given, steppers = _named(model, "model"), _named(optimizer, "optimizer")
        check_kinds(given, steppers)
        self._refuse_several(chosen)
        named = {name: in_place(each) for name, each in given.items()}
        models, optimizers = joined(named, steppers)
        self.training = Training(models, optimizers)
        shown, _ = self._distribute(models, optimizers, chosen, options, held)
        return _as_given(models_of(shown), model), optimizer

    def _distribute(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        chosen: Strategy,
        options: DistributeOptions,
        held: ExitStack,
    ) -> tuple[nn.Module, Optimizer]:
        """Distribute one model; `held` collects the calls that undo its changes."""
        refuse_wrapped(model)
        refuse_lazy(model)
        refuse_reused(model)
        give_own_memory(model)
        if options.keyed_dropout and chosen.synchronous:
            held.callback(unkey_dropout, model)
            _key_dropout(model)
        syncs = options.sync_batchnorm or has_sync_batchnorm(model)
        if syncs:
            _check_syncs(chosen)
            held.callback(unsync_batchnorm, model)
            sync_batchnorm(model, every=options.sync_batchnorm)
        device = device_of(model)
        check_gpu(options.local_rank, device)
        self._choose_backend(chosen, device, options)
        if not chosen.initialises:
            initialise(model, device, torch.initial_seed())
        self._keep_checkpoints(chosen, options.checkpoints)
        if chosen.carries or self.registered:
            chosen.carry(self.registered)
        self._check_scales(chosen, self.registered.scaler)
        self._optimizer, self._model = optimizer, model
        given = references(model.parameters())
        self._controller.details.listings |= listings_of(model, optimizer)
        distributed = chosen.distribute(model, optimizer)
        self.fields |= {"strategy": chosen.name, "torch": torch.__version__, **chosen.fields()}
        if options.validators.names:
            self.fields["validators"] = options.validators.names
        if syncs:
            self.fields["sync_batchnorm"] = "true"
        if chosen.synchronous:
            # Asynchronous members may compute on different devices.
            self.fields |= devices_of(model, self.fields.get("backend", ""))
        self._controller.set_strategy(chosen, options.validators)
        optimizers = list(optimizers_of(optimizer).values())
        trained = self._parameters = TrainedParameters(distributed[0])
        self._guard = StepGuard(optimizers, self.registered, trained, chosen, given)
        self._controller.on_entered = self._guard.note_generation
        held.callback(self._guard.release)
        if self.registered:
            self.fields["registered"] = self.registered.description
        models = (model, distributed[0])
        owners = [each for one in models for each in models_of(one).values()]
        calls = self._calls_of(optimizers, owners, chosen, options)
        if calls is not None:
            held.callback(calls.release)
            calls.watch()
        long_lived = LongLivedObjects()
        held.callback(long_lived.release)
        long_lived.freeze()
        return distributed

    def _calls_of(
        self,
        optimizers: Sequence[Optimizer],
        models: Sequence[nn.Module],
        chosen: Strategy,
        options: DistributeOptions,
    ) -> ScriptCalls | SchedulerWatch | None:
        """Return the watch on calls of schedulers and averages; None if the strategy needs none."""
        if chosen.carries:
            return ScriptCalls([*optimizers, *models], self.registered, options.in_step)
        if chosen.schedule_option or chosen.synchronous:
            return SchedulerWatch(optimizers, chosen)
        return None

    def _choose_backend(
        self, chosen: Strategy, device: torch.device, options: DistributeOptions
    ) -> None:
        if chosen.synchronous:
            chosen.use_backend(backend_for(device.type, options.backend or None))

    def _keep_checkpoints(self, chosen: Strategy, checkpoints: Checkpoints | None) -> None:
        # "none" too: an optional field is compared only between members that state it.
        steps = "none" if checkpoints is None else f"every {checkpoints.every_steps} steps"
        self._controller.details.optional_fields["checkpoints"] = steps
        if checkpoints is not None:
            chosen.keep_checkpoints(checkpoints)

    def _refuse_several(self, chosen: Strategy) -> None:
        if not chosen.trains_several:
            raise InvalidSpec(
                f"strategy {chosen.name} trains one model with one optimizer",
                seen="several models or optimizers",
                expected="ddp, zero1, zero2, zero3, fsdp or hsdp; or one module that holds all"
                " models, with an optimizer of several groups",
            )

    def _check_scales(self, chosen: Strategy, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is None:
            return
        if not chosen.unscales:
            raise InvalidSpec(
                f"strategy {chosen.name} does not unscale gradients",
                seen="a registered GradScaler",
                expected="ddp or zero1 without compression; zero2, zero3, fsdp or hsdp without"
                " cpu_offload; tensor or fsdp-tensor; or bfloat16, which needs no scaling",
            )
        if self.training is not None:
            raise InvalidSpec(
                "a registered GradScaler with several optimizers",
                expected="bfloat16, which needs no scaling",
            )

    def choose(
        self,
        given: Optimizer | Sequence[Optimizer] | None,
        call: str,
        *,
        weight: object = None,
    ) -> SynchronousStrategy | None:
        """Choose the optimizers for the strategy's next call. Return the strategy; None if
        `training` is None. Raises InvalidSpec if the choice is unclear, for another session's
        optimizer, and for a weight with several optimizers."""
        if self.training is None:
            if given is not None and given is not self._optimizer:
                raise InvalidSpec(
                    f"{call} is for an optimizer that is not the session's",
                    seen=type(given).__name__,
                    expected="the optimizer that session.distribute was given",
                )
            return None
        if weight is not None:
            raise InvalidSpec(
                "a loss with a weight, with several optimizers",
                seen=f"{call}(loss, weight=...)",
                expected="means over the batch's samples",
            )
        strategy = self._controller.strategy
        assert isinstance(strategy, SynchronousStrategy), "others refuse several optimizers"
        strategy.choose(self.training.chosen(given, call))
        return strategy

    def register(self, name: str, stateful: Stateful) -> None:
        """See `Session.register`."""
        if self._controller.has_proposed:
            raise InvalidSpec(
                f"{name!r} is registered too late",
                seen="a batch or a step before the call",
                expected="session.register before the first batch, on every member",
            )
        if self.fields:
            self._controller.strategy.carry(self.registered)
        scaler = enabled_scaler(stateful)
        if scaler is not None:
            _check_scaler(name, self.registered, scaler)
        if self.fields:
            self._check_scales(self._controller.strategy, scaler)
        self.registered.add(name, stateful)
        if self.fields:
            self.fields["registered"] = self.registered.description

    @property
    def guard(self) -> StepGuard:
        """Guard of steps. Raises InvalidSpec if nothing is distributed."""
        _ = self._controller.strategy
        assert self._guard is not None, "made by `distribute`"
        return self._guard

    def check_model(self) -> None:
        """Raise InvalidSpec if the script has changed the model's layers or parameters since
        `distribute`."""
        if self._parameters is not None:
            self._parameters.check(0)

    def note_samples(self, dataset: Any, order: Callable[[], Order]) -> Mapping[str, str]:
        """Set and return the proposal's fields about the samples. Warns of layers for which a share
        may be too small. `order` returns the present order."""
        details, samples = self._controller.details, fields_of(dataset, order())
        self.fields |= samples
        content, listings = content_fields(dataset)
        details.optional_fields |= content
        details.listings |= listings
        details.shares = self._share_sizes(order)
        return {**samples, **content}

    def _share_sizes(self, order: Callable[[], Order]) -> ShareSizes | None:
        """Return the check of share sizes for BatchNorm; None if BatchNorm is synced, or if the
        strategy cannot sync it."""
        if not self._controller.strategy.syncs_batchnorm or "sync_batchnorm" in self.fields:
            return None
        assert self._model is not None, "batches are made after `distribute`"
        spec = self._controller.member.spec
        is_bounded = spec.max_members < MAX_MEMBERS
        shares = ShareSizes(order, spec.max_members if is_bounded else spec.desired_members)
        shares.warn_of_norm_layers(self._model)
        return shares

    def release(self) -> None:
        """Undo all changes to the script's objects, after the session. May be called twice."""
        self._held.close()


def _key_dropout(model: nn.Module) -> None:
    key_dropout(model)
    if names := with_dropout_within(model):
        log.warning(
            "dropout_depends_on_members",
            modules=", ".join(names[:5]),
            hint="the dropout within attention and recurrent layers depends on the number of"
            " members; to avoid this, set dropout=0 there and use nn.Dropout modules",
        )


def _check_syncs(chosen: Strategy) -> None:
    if not chosen.syncs_batchnorm:
        raise InvalidSpec(
            f"strategy {chosen.name} does not normalise over members",
            seen="sync_batchnorm=True, or a model with SyncBatchNorm",
            expected="ddp, zero1, zero2, zero3, fsdp or hsdp; under tensor every member has the"
            " whole batch anyway",
        )


def _check_scaler(name: str, registered: RegisteredState, scaler: torch.amp.GradScaler) -> None:
    if type(scaler) not in _KNOWN_SCALERS:
        raise InvalidSpec(
            f"{name!r} is an unknown kind of GradScaler",
            seen=type(scaler).__qualname__,
            expected="torch.amp.GradScaler itself, whose scale the session updates",
        )
    if registered.scaler is not None:
        raise InvalidSpec(f"{name!r} is a second GradScaler", expected="one for the session's loss")


def _named(given: Any, alone: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Sequence):
        return {str(index): each for index, each in enumerate(given)}
    return {alone: given}


def _as_given(named: Mapping[str, Any], given: Any) -> Any:
    if isinstance(given, Mapping):
        return dict(named)
    return list(named.values()) if isinstance(given, Sequence) else next(iter(named.values()))
