"""Transaction of a synchronous step: all members take the step, or it did not happen.

Once all votes are known, the optimizer steps within `committing`. Until then `roll_back` undoes the
step: the writes that the snapshot covers, changes of registered objects, and a call of
`session.stop`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import structlog
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.several import (
    SeveralModels,
    SeveralOptimizers,
    Training,
    optimizers_of,
    parts_due,
)
from shoal.state.registered.objects import RegisteredState
from shoal.strategies.rollback.step_snapshot import StepSnapshot
from shoal.strategies.synchronous.hyperparameters import Hyperparameters, Values
from shoal.strategies.synchronous.loss_scale import update
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal.strategies.synchronous.step_agreement import StepAgreement
from shoal.strategies.synchronous.step_vote import OptimizerAction
from shoal.torch_private.amp import scale_of
from shoal_proto.errors import GenerationBroken, InvalidSpec

log = structlog.get_logger(__name__)


class StepTransaction:
    """The step in progress on this member. One object for all steps, in all generations."""

    def __init__(
        self, position: ScriptPosition, sign: Callable[[], None], *, passes_meet: bool
    ) -> None:
        """`sign` notes progress of the trainer. `passes_meet`: members communicate in passes."""
        self.step = 0
        self.position = position
        self.registered = RegisteredState()
        self.snapshot = StepSnapshot()
        self.in_step = False
        self.is_weighted = False
        self.training: Training | None = None
        """The models of each optimizer; None for one model and one optimizer without names."""
        self.chosen: frozenset[str] = frozenset()
        self.due: frozenset[str] = frozenset()
        self._sign, self._passes_meet = sign, passes_meet
        self._computes = False
        self._votes: StepAgreement | None = None

    # --- model and generation ---

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Set the model and optimizer of all steps. Called before any other method."""
        self.hyperparameters = Hyperparameters(optimizer)
        self._optimizers = list(optimizers_of(optimizer).values())
        if isinstance(model, SeveralModels) and isinstance(optimizer, SeveralOptimizers):
            self.training = Training(model, optimizer)

    def enter(
        self, group: dist.ProcessGroup, members: Sequence[str], *, shares_samples: bool
    ) -> None:
        """Begin a generation; arguments as for `StepAgreement`."""
        self._votes = StepAgreement(
            group, members, self.hyperparameters, self.position, shares_samples=shares_samples
        )

    @property
    def votes(self) -> StepAgreement:
        """The votes of the present generation. Raises GenerationBroken outside any generation."""
        if self._votes is None:
            raise GenerationBroken(f"step {self.step} was begun outside any generation")
        return self._votes

    # --- begin ---

    def begin(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Begin a step; see `StepSnapshot.begin`."""
        self._sign()
        self.registered.attempt()
        self.position.set_wait_point(f"session.step() after {self.step} steps")
        self.snapshot.begin(model, parameters, self._optimizers)
        self.begin_alone()
        self.votes.begin(self.step)

    def begin_alone(self) -> None:
        """Begin a step on which members do not vote: the strategy rolls back whole rounds."""
        self.position.norms.clear()
        self.in_step, self.is_weighted = True, False
        self.due = frozenset()

    # --- passes ---

    def models(self, optimizers: frozenset[str]) -> frozenset[str]:
        """Name the models that these optimizers train; a single model has the empty name."""
        return frozenset([""]) if self.training is None else self.training.models_of(optimizers)

    def take(self, call: str) -> frozenset[str]:
        """Return the chosen optimizers. Raises InvalidSpec if one of them has no gradients."""
        if missing := self.chosen - self.due:
            raise InvalidSpec(
                f"{call} of an optimizer that has no gradients in this step",
                seen=", ".join(sorted(missing)),
                expected="an earlier session.backward(loss, optimizer=...) for that optimizer",
            )
        return self.chosen

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """List the parameters of the chosen optimizers."""
        return [
            one
            for name, each in optimizers_of(optimizer).items()
            if name in self.chosen
            for group in each.param_groups
            for one in group["params"]
        ]

    def expects_gradient(self) -> bool:
        """True if a gradient may arrive now: the session asked for it, or no step has begun."""
        return self._computes or not self.in_step

    @contextmanager
    def weighted_backward(self) -> Iterator[None]:
        """Return a context for a backward pass whose loss is weighted by this member's share.

        Raises UnequalPasses on all members if passes communicate and not all make this pass, and
        InvalidSpec once the members have voted for the step.
        """
        if self.votes.is_settled:
            raise InvalidSpec(
                f"a backward pass after session.clip_grad_norm, in step {self.step}",
                seen="gradients that the members have combined and scaled",
                expected="all backward passes of the step, and then session.clip_grad_norm",
            )
        if self._passes_meet:
            self.votes.vote_pass()
            self.agree_on(OptimizerAction.BACKWARD)
        self._computes = self.is_weighted = True
        self.due |= self.chosen
        try:
            yield
        finally:
            self._computes = False

    def add_weight(self, weight: float) -> float:
        """Add the weight of a loss; return the factor for the loss."""
        self.votes.weights.add(weight)
        return weight / self.votes.weights.unit

    @property
    def has_own_weights(self) -> bool:
        """True if the script has given weights for this member's losses."""
        return self.votes.weights.are_own

    def check_weighted(self) -> None:
        """Raise InvalidSpec if the step had no backward pass of the session."""
        if not self.is_weighted:
            raise InvalidSpec(
                f"step {self.step} has no session.backward(loss)",
                seen="no backward pass, or a plain loss.backward()",
                expected="session.backward(loss) once or more, weighted by this member's share",
            )

    @contextmanager
    def updating(self, optimizer: Optimizer, held: Sequence[Tensor]) -> Iterator[None]:
        """Return a context in which the chosen optimizers step before the end of the step.

        `held`: this member's tensors that these optimizers change.
        """
        assert isinstance(optimizer, SeveralOptimizers), "only several optimizers are updated early"
        optimizer.due = self.chosen
        parts = parts_due(optimizer)
        with self.snapshot.updating(parts, held):
            yield
        for each in parts:
            each.zero_grad(set_to_none=True)
        self.due -= self.chosen

    # --- votes ---

    def agree_on(self, action: OptimizerAction) -> None:
        """See `StepAgreement.vote_action`. Does nothing if there is only one optimizer."""
        if self.training is not None:
            self.votes.vote_action(action, self.chosen)

    def begin_part(self, index: int, num_parts: int) -> bool:
        """See `StepAgreement.begin_part`."""
        return self.votes.begin_part(index, num_parts)

    def settle(self) -> float:
        """See `StepAgreement.settle`. Returns the factor for gradients; 1 if the step was settled
        before.
        """
        factor, scaler = self.votes.settle(), self.registered.scaler
        scale = 1.0 if factor is None or scaler is None else scale_of(scaler)
        return 1.0 if factor is None else factor / scale

    def settle_round(self, applied: Mapping[int, Values], conflict: str) -> None:
        """See `StepAgreement.settle_round`."""
        self.votes.settle_round(applied, conflict)

    # --- commit, or roll back ---

    @contextmanager
    def committing(self, optimizer: Optimizer, *, overflowed: bool = False) -> Iterator[None]:
        """Return a context in which the optimizers with gradients step; its end commits the step.

        After an error within it, the state belongs to no committed step. `overflowed`: the
        gradients overflowed, so that no optimizer steps.
        """
        self.snapshot.settle()
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.due = self.due
        yield
        self._sign()
        scaler = self.registered.scaler
        if scaler is not None:
            log.debug("loss_scaled", step=self.step, overflowed=overflowed)
            self.registered.defer(partial(update, scaler, overflowed=overflowed))
        self.registered.stepped()
        self.step += 1
        self.in_step = False
        self.snapshot.commit()
        self.registered.committed()
        self.position.stepped()

    def roll_back(self) -> None:
        """Undo the step in progress, if there is one, so that it can be taken again."""
        if self.in_step:
            self._undo()
            self.position.undo(self.step)
            self.hyperparameters.failed(self.step)

    def withdraw(self) -> None:
        """Undo the step in progress for good. May raise StateLost."""
        self._undo()
        self.position.set_wait_point("")
        self.snapshot.check_whole(self.step)

    def repeat(self) -> None:
        """Undo the step in progress, so that it is taken again in this generation. May raise
        StateLost."""
        self.roll_back()
        self.snapshot.check_whole(self.step)

    def _undo(self) -> None:
        self.in_step = False
        self.snapshot.restore()
        self.registered.undo()

    # --- the end of a generation ---

    def cut(self, reason: str) -> None:
        """Make this member's waits for votes raise. Thread-safe."""
        votes = self._votes
        if votes is not None:
            votes.cut(reason)

    def leave(self) -> None:
        """Release the votes' memory and the model."""
        votes, self._votes = self._votes, None
        self.snapshot.forget()
        if votes is not None:
            votes.close()
