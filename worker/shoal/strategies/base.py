"""The interface between the session and a strategy, with the promises of both.

The session calls a strategy object in this order, on the trainer's thread unless a docstring names
another:

    distribute -> attach -> enter(generation)
      -> [begin_step -> backward... -> end_step] per step
      -> on a lost peer, synchronous only: cut (on another thread, at any time) -> abandon
         -> enter(next generation)
      -> on a planned change, synchronous only: hand_over -> abandon -> enter(next generation)
      -> asynchronous only, training on meanwhile: enter(next generation)
    -> close

A step is committed when `end_step` returns. If a step fails before that, then after `abandon`
`step` and the state are as after the last committed step, or after the last round of local steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.backends.process_group.interface import Backend
from shoal.checkpoint.interface import CheckpointStore, WrittenCheckpoint
from shoal.data.order import Order
from shoal.layouts.base import LossFunction
from shoal.membership.generation import Context, Generation
from shoal.state.registered.objects import RegisteredState
from shoal.weights.pieces import HeldWeights
from shoal_proto.errors import InvalidSpec, ShoalError


class Strategy(ABC):
    """Base of the strategies."""

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    """True: all members take each step, or each round of local steps, together. False: members
    train on through every change."""

    passes_meet: ClassVar[bool] = True
    """Synchronous strategies: True if members communicate in the passes of a step."""
    compiles: ClassVar[bool] = True
    """True if `torch.compile` may be called on the distributed model."""
    trains_several: ClassVar[bool] = False
    """True if several models and optimizers may be distributed."""
    changes_batch_size: ClassVar[bool] = False
    """True if a job may continue from a checkpoint with another batch size."""
    syncs_batchnorm: ClassVar[bool] = False
    """True if BatchNorm may normalise over the samples of all members."""
    shares_samples: ClassVar[bool] = False
    """True if several members work on the same samples."""
    cuts_batches: ClassVar[bool] = False
    """True if members have shares of one batch, with one gradient of all shares."""
    updates_alike: ClassVar[bool] = False
    """True if every member's optimizer makes the same update, of the whole model."""
    state_is_spread: ClassVar[bool] = False
    """True if only all members together hold the whole model."""
    carries: ClassVar[bool] = False
    """True if registered state is committed with the steps; see `carry`."""
    initialises: ClassVar[bool] = False
    """True if `distribute` accepts a model on the meta device."""

    @abstractmethod
    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the model and optimizer to train with; the same objects over all generations.

        Called once. Raises RefusedError for all that can be checked without communication.
        """

    def use_backend(self, backend: Backend) -> None:  # noqa: B027 - not all have collectives
        """Use this backend for collectives. Called before `distribute`, if `synchronous`."""

    def keep_checkpoints(self, checkpoints: CheckpointStore) -> None:
        """Write checkpoints, and start from one if no member has state. Called before `distribute`.

        Raises InvalidSpec if members do not hold the state, or the bucket cannot store checkpoints.
        """
        raise InvalidSpec(
            f"strategy {self.name} writes no checkpoints",
            expected="a synchronous strategy, whose members hold the state",
            fix="Save the parameters on servers with `shoal snapshot JOB`, and bring them back with"
            " `shoal restore JOB`.",
        )

    def carry(self, registered: RegisteredState) -> None:
        """Commit this state with each step, restore it if a step fails, and send it with the
        model's state.

        Called before `distribute`, and again, with the same object, for each later registration.
        """
        if not self.carries:
            raise InvalidSpec(
                f"strategy {self.name} carries no registered state",
                expected="a strategy whose members commit each step together, such as ddp or fsdp",
                fix=f"Give a schedule of learning rates with {self.schedule_option}."
                if self.schedule_option
                else "",
            )

    @property
    def schedule_option(self) -> str:
        """Option for a learning-rate schedule by the updates of all members; "" if none."""
        return ""

    @property
    def given_schedule(self) -> LRScheduler | None:
        """Schedule given by `schedule_option`, if any."""
        return None

    @property
    def unscales(self) -> bool:
        """True if losses may be scaled by a registered GradScaler."""
        return False

    def gradients_lack(self) -> str:
        """Description of the gradients if torch's `clip_grad_norm_` cannot measure them; else
        empty.
        """
        return self.unsettled_gradients()

    def unsettled_gradients(self) -> str:
        """Description of the gradients while they are a multiple of the mean's; else empty."""
        return ""

    def gathers_lack(self) -> str:
        """Obstacle to gathering members' rows within a step; empty if there is none."""
        if not (self.synchronous and self.passes_meet):
            return "members that take their own steps, with models that differ meanwhile"
        return ""

    def between_steps(self) -> None:  # noqa: B027 - nothing is carried by default
        """Note that the script has finished the latest step. Called by all members at the same
        step.

        Raises what `end_step` raises; also RegisteredStateDiffers, on all members.
        """

    def trains_on(self, samples: Mapping[str, str], order: Order) -> None:  # noqa: B027
        """Set what determines the order of samples: global batch, dataset, seed, shuffle.

        Called once, before the first generation; never if the script makes its own batches. May
        raise InvalidSpec for hooks on gradients that the script has added since `distribute`.
        """

    def checkpoint_steps(self) -> Sequence[int]:
        """Return the steps of the newest complete checkpoints that this member sees, at most 100.

        Called on the membership's thread. Raises InvalidSpec if the storage cannot be listed.
        """
        return ()

    @property
    def written_checkpoint(self) -> WrittenCheckpoint | None:
        """The newest checkpoint that this member helped to write, if any. Thread-safe."""
        return None

    @property
    def writes_checkpoints(self) -> bool:
        """True if members write checkpoints, also when a member leaves unreplaced."""
        return False

    def leaves_with_checkpoint(self) -> bool:
        """True if this member has to leave after the latest step, and no further generation
        follows.

        Returns once the checkpoint of that step is written, or has failed. Raises GenerationBroken
        if it was abandoned, as a member was lost.
        """
        return False

    def keep_alone(self) -> None:  # noqa: B027 - most hold a part of the state
        """Write a checkpoint of the latest step, if this member holds the whole state.

        Called if the member is to leave and no generation runs.
        """

    @property
    def checkpoint_failure(self) -> ShoalError | None:
        """The error of this member's last checkpoint, known after its last step; None if there is
        none.
        """
        return None

    @property
    def checkpoint_due(self) -> bool:
        """True if a checkpoint of the state after the latest step is to be written."""
        return False

    @abstractmethod
    def fields(self) -> Mapping[str, str]:
        """Values for the proposal that all members must have in common.

        At least "schema" and "optimizer" digests.
        """

    def refuses(self, world_size: int) -> str:
        """Reason why this number of members cannot train the model; empty if it can.

        Called on the membership's thread, too: be quick.
        """
        return ""

    def attach(self, context: Context) -> None:
        """Set the context. Called once, after `distribute`."""
        self.context = context

    @abstractmethod
    def enter(self, generation: Generation) -> None:
        """Bring the generation up; return once its first collective (if any) has completed.

        Raises GenerationBroken, or an error for which `is_failure` is True, if the generation
        breaks.
        """

    def cut(self, generation: int) -> None:  # noqa: B027 - nothing to cut is a fine default
        """Make every wait for a peer, in this and earlier generations and in `enter`, raise soon.

        Runs on any thread: be quick, raise nothing.
        """

    def hand_over(self, *, leaving: Collection[str] = ()) -> None:  # noqa: B027 - all hold all
        """Copy state that only leaving members hold to members that stay.

        Called by all members, at the same step, before any of them abandons the generation.
        `leaving`: names of the members that leave.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Leave the generation, whether it broke or not; the state is as after the last commit.

        Quick, raises nothing, may be called twice.
        """

    @abstractmethod
    def begin_step(self) -> None:
        """Prepare a step: drop gradients, and set parameters to the values to compute with.

        May raise the errors of a pull.
        """

    def begin_part(self, index: int, num_parts: int) -> None:  # noqa: B027
        """Begin part `index` of `num_parts` of this member's share.

        Gradients have to be reduced only after the last part.
        """

    def drop_gradients(self, optimizer: Optimizer) -> None:  # noqa: B027 - most hold all of them
        """Drop this member's gradients of parameters that other members step by this optimizer of
        the session: its `zero_grad` does not reach them."""

    @abstractmethod
    def backward(self, loss: Tensor, weight: float) -> None:
        """Compute gradients of `loss`, the mean over this member's samples.

        `weight`: weight of this member's share; weights average to one over the members. May be
        called several times in a step; gradients add up.
        """

    def backward_by_weight(self, loss: Tensor, weight: float) -> None:
        """Compute gradients of `loss`, a mean over `weight` units, such as tokens.

        Raises InvalidSpec if the strategy weights losses by samples only.
        """
        raise InvalidSpec(
            f"strategy {self.name} weights losses by samples only",
            seen="session.backward(loss, weight=...)",
            expected="session.backward(loss), the mean over the batch's samples; or one of ddp,"
            " zero1, zero2, zero3, fsdp, hsdp, tensor, fsdp-tensor, or hybrid without stages"
            " (pipeline=1)",
        )

    @property
    @abstractmethod
    def local_model(self) -> nn.Module:
        """The modules that this member's passes call, and whose buffers passes change. Cheap."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that a forward pass calls at present."""

    def forward_backward(
        self, inputs: Any, targets: Any, loss_function: LossFunction, weight: float
    ) -> Tensor:
        """Run the forward and the backward pass, for strategies that interleave them.

        Returns the mean loss over this member's samples, detached.
        """
        loss = loss_function(self.module(inputs), targets)
        self.backward(loss, weight)
        return loss.detach()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the step's gradients to a common 2-norm of at most `max_norm`; return the norm
        before.

        Called after all backward passes. This implementation is for members that hold the whole
        model.
        """
        norm: Tensor = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return norm

    @abstractmethod
    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the whole model by name, as of the last committed step or round of local steps.

        If `state_is_spread`, all members call this at the same step.
        """

    def weights(self) -> HeldWeights:
        """Return this member's part of the model after the last committed step or round; not
        copied.

        Raises GenerationBroken outside a generation, and InvalidSpec if the strategy does not
        publish its weights.
        """
        raise InvalidSpec(
            f"strategy {self.name} does not publish its weights",
            expected="one of Shoal's own strategies; or publish(model=...) of a module",
        )

    def own_weights(self) -> HeldWeights:
        """Return what `weights` returns, without the part that is on parameter servers.

        Raises InvalidSpec if the strategy publishes no tables.
        """
        raise InvalidSpec(
            f"strategy {self.name} does not publish tables",
            seen="session.series(..., tables=True)",
            expected="async-sgd, ssp or bsp, whose tables are on parameter servers",
        )

    def check_result(self) -> None:  # noqa: B027 - nothing is wrong by default
        """Raise TrainingFailed if training has no usable result, once the job is complete."""

    def finish_passes(self) -> None:  # noqa: B027 - most strategies have nothing to check
        """Check forward passes between two steps; called by all members.

        Raises InvalidSpec, on all members, if members that split layers computed with different
        layers.
        """

    def data_share(self, generation: Generation) -> tuple[int, int]:
        """Return the index of this member's share of each batch, and the number of shares."""
        return generation.rank, generation.world_size

    @abstractmethod
    def end_step(self, acknowledged: Callable[[], None]) -> None:
        """Apply the gradients and commit: `step` is one higher on return.

        Calls `acknowledged`, on any thread and possibly later, once the step, or its round of local
        steps, can no longer be rolled back. Raises NonFiniteGradient, refusals of the step and, if
        a peer was lost, GenerationBroken or an error for which `is_failure` is True.
        """

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of committed steps: of the job, or of this member if asynchronous."""

    @property
    @abstractmethod
    def has_state(self) -> bool:
        """True if this member holds state from a generation that it has fully entered."""

    def hang_report(self, generation: int) -> str:
        """Description of the hang for which this member ended the generation; else empty."""
        return ""

    def refusal_in(self, generation: int) -> InvalidSpec | None:
        """The error in the members' scripts for which the generation was ended; else None."""
        return None

    def note_coordinator_wait(self, *, begins: bool) -> None:  # noqa: B027 - nobody watches by default
        """Note that the trainer begins or stops waiting for the coordinator. Cheap."""

    def note_loading(self, *, begins: bool) -> None:  # noqa: B027 - nobody watches by default
        """Note that the trainer begins or stops waiting for a batch. Cheap."""

    def has_leftovers(self) -> bool:
        """True if results of collectives may be incomplete after an abort without an error."""
        return False

    def is_failure(self, error: BaseException) -> bool:
        """True if the error means that a peer failed; False for the script's own errors."""
        return False

    def redoes(self, error: BaseException) -> bool:
        """True if this member alone has to repeat the step that ended with this error.

        Called before anything else handles the error.
        """
        return False

    def finish(self) -> None:  # noqa: B027 - members at their own pace have nothing to wait for
        """Wait until every member has committed the steps that this member has committed.

        If a member is lost before that, the others cannot take steps again without this member.
        Asynchronous strategies get the final values instead. Raises what `between_steps` raises.
        """

    def metrics(self) -> Mapping[str, float]:
        """Figures for the health report, such as "staleness". Cheap; thread-safe."""
        return {}

    @property
    def warning(self) -> str:
        """A warning about the training for the health report. Cheap."""
        return ""

    def rest(self) -> None:  # noqa: B027 - nobody waits for a member by default
        """Note that this member has no samples for now: others need not wait for it."""

    def flush(self) -> None:  # noqa: B027 - most strategies have nothing in flight
        """Wait until every step ended so far is acknowledged."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice, and without `enter`. Raises CheckpointFailed if
        the checkpoint in progress fails."""
