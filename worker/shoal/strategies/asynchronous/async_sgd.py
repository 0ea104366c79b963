"""The strategy `async-sgd`: every member trains at its own pace against the parameter servers.

A step pushes its gradients and receives the values right after the push, in one exchange with every
server. The optimizer runs on the servers, once for all members.

- A parameter that has no gradient in a step is skipped, as by `torch.optim`. Changes by other
  members still arrive.
- Buffers, and the state of modules with `get_extra_state`, are not shared.
- Training starts from the values of rank 0 of the first generation. If that member is lost or late,
  another member creates the missing shards from its own initial values.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn

import structlog
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.backends.abortable.waiter import waiting
from shoal.compression import find_compression
from shoal.compression.base import Compression
from shoal.data.order import Order
from shoal.embedding.exchange import TableExchange
from shoal.embedding.row_codec import row_codec
from shoal.membership.generation import Context, Generation
from shoal.model.digests import optimizer_digest, schema_digest
from shoal.model.gradients import StepGradients, refuse_sparse
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.state.host_copies import state_dict_on_host
from shoal.strategies.asynchronous.first_values import await_servers, first_values
from shoal.strategies.asynchronous.gradients import gradients_of
from shoal.strategies.asynchronous.loss_watch import LossMonitor
from shoal.strategies.asynchronous.optimizer_spec import (
    FollowedSchedule,
    message_text,
    refuse_changes,
    to_spec,
)
from shoal.strategies.asynchronous.push_compression import PushCompressor
from shoal.strategies.asynchronous.push_counts import PushCounts
from shoal.strategies.asynchronous.sample_leases import Leases
from shoal.strategies.asynchronous.shared_values import SharedValues, bytes_of
from shoal.strategies.asynchronous.staleness_clock import StalenessClock
from shoal.strategies.asynchronous.staleness_policy import policy_in_words, to_policy
from shoal.strategies.leasing import LeasingStrategy
from shoal.strategies.rollback.step_snapshot import StepSnapshot
from shoal.torch_private.schedulers import mark_stepped
from shoal.weights.pieces import HeldWeights, replicated_weights
from shoal_client.connection.coordinators import Coordinators
from shoal_client.parameters.dense import ParameterClient, PushResult
from shoal_client.parameters.job_shards import JointStep
from shoal_client.progress.samples import SampleClient
from shoal_client.shards.parts import EncodedPush
from shoal_proto.errors import (
    InternalError,
    InvalidSpec,
    StalePush,
)
from shoal_proto.numbers_given import convert_fields
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.optimizer_pb2 import OptimizerSpec, StalenessPolicy

log = structlog.get_logger(__name__)

LEVELS = ("applied", "replicated", "durable")
MAX_REDONE = 16
BEGINNING_UPDATES = 100
"""Number of steps of all members after which a joining member does not watch the loss."""


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """Copy of the model that all members train together."""

    model: nn.Module
    optimizer: Optimizer
    values: SharedValues
    spec: OptimizerSpec
    gradients: StepGradients
    compressor: PushCompressor | None = None
    """None: gradients are pushed uncompressed."""
    followed: FollowedSchedule | None = None
    """Schedule that this member steps, to send its rates with each push."""

    @cached_property
    def untrained(self) -> Mapping[str, Tensor]:
        """Parameters that the optimizer does not train, by name."""
        shared = self.values.parameters
        return {name: each for name, each in self.model.named_parameters() if name not in shared}


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    policy: StalenessPolicy
    schedule: LRScheduler | None
    """None: the optimizer's own rates are sent with each push."""
    acknowledgement: Acknowledgement.ValueType
    lost_wait_s: float = 0.0
    must_fall: bool = False
    compression: Compression | None = None

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("lost_wait_s",))
        if not 0.0 <= self.lost_wait_s < math.inf:
            raise InvalidSpec(
                "lost_wait_s is out of range",
                seen=str(self.lost_wait_s),
                expected="0 or more seconds, finite",
            )
        if self.compression is not None and self.policy.kind == "compensate":
            raise InvalidSpec(
                "compressed gradients cannot be corrected for delay",
                seen=f"compression={str(self.compression)!r} with staleness='compensate'",
                expected="one of the two",
                fix="Delay compensation also sends the values that gradients were computed on,"
                " uncompressed: train with staleness='damp'.",
            )


def acknowledgement_level(acknowledge: str) -> Acknowledgement.ValueType:
    """Return the level of this name. Raises InvalidSpec if there is none."""
    name = f"ACKNOWLEDGEMENT_{acknowledge.upper()}"
    if acknowledge not in LEVELS:
        raise InvalidSpec(
            "no such level of acknowledgement",
            seen=repr(acknowledge),
            expected=" or ".join(LEVELS),
        )
    # If a shard has no backup, "replicated" is the acknowledgement of its primary alone.
    return Acknowledgement.Value(name)


class StepRefusals:
    """Refusals of the step in progress as too stale."""

    def __init__(self) -> None:
        self.shards: frozenset[int] = frozenset()
        """The shards that refused the last push; the others have applied it."""
        self.num_redone = 0
        # Buffers are each member's own, and in no checkpoint.
        self._snapshot = StepSnapshot(refuses_late=False)

    def begin(self, model: nn.Module, untrained: Mapping[str, Tensor]) -> None:
        """Begin a step that may be refused: `undo_refused_step` undoes its changes to untrained
        tensors.
        """
        self._snapshot.begin(model, untrained)

    @property
    def may_redo(self) -> bool:
        return self.num_redone <= MAX_REDONE

    def undo_refused_step(self, stale: Mapping[int, StalePush], step: int) -> None:
        """Undo the refused step. Raises StateLost if `check_whole` does."""
        self.shards = frozenset(stale)
        self.num_redone += 1
        self._snapshot.restore()
        self._snapshot.check_whole(step)

    def mark_taken(self) -> None:
        self.shards, self.num_redone = frozenset(), 0
        if self._snapshot.is_open:
            self._snapshot.settle()
            self._snapshot.commit()

    def raise_refusal(self, step: int, refusal: StalePush) -> NoReturn:
        """Raise the refusal; after too many, a StalePush with their number."""
        if self.may_redo:
            raise refusal
        raise StalePush(
            f"step {step} was refused as too stale too many times",
            seen=f"{self.num_redone} times, at last with {refusal.seen}",
            expected=refusal.expected,
            fix="Raise reject_above, or give this member smaller batches.",
        )


class AsyncSGD(LeasingStrategy):
    """Strategy "async-sgd": each member trains at its own pace against the parameter servers."""

    name: ClassVar[str] = "async-sgd"
    pushes_rows: ClassVar[bool] = True
    watch_counts: ClassVar[str] = "updates"

    def __init__(
        self,
        *,
        consistency: str = "async",
        staleness_bound: int | None = None,
        staleness: str = "damp",
        reject_above: int | None = None,
        compensation: float | None = None,
        adaptive: bool = True,
        schedule: LRScheduler | None = None,
        acknowledge: str = "replicated",
        compression: str | Compression | None = None,
        lost_wait_s: float = 0.0,
        loss_must_fall: bool = False,
    ) -> None:
        """`consistency` and `staleness_bound` (in rounds, for "ssp"): see `StalenessClock`.

        `staleness`: "damp", "none", "scale", "compensate" or "reject", see `staleness_policy.py`;
        `reject_above`: the staleness, in updates, above which a gradient is refused under any of
        these policies. `compensation`: DC-ASGD's lambda_0, or its lambda if not `adaptive`.

        `schedule`: one of torch's schedules of the distributed optimizer, by the number of updates
        of all members together; the script does not step it. If the servers do not know its class,
        each member steps it, and sends the rates with its pushes.

        `acknowledge`: the acknowledgement that a push waits for. "applied": the shard's primary has
        applied the push, which may be lost with this server. "replicated": every backup has it too,
        if there is one. "durable": it is also in the journal on the primary's disk.

        `compression`: as for `shoal.DDP`; not with "compensate". `lost_wait_s`: if every server of
        a shard is gone, the time that a step waits for a server to return with its journal. The
        time includes up to 15 minutes until the shard is declared lost. Then the step raises
        StateLost. `loss_must_fall`: raise TrainingFailed after the last sample if the loss is not
        lower than at first. A loss that is not finite is always an error.

        Raises InvalidSpec for options that are out of range or contradict each other.
        """
        self._options = PushOptions(
            policy=to_policy(staleness, reject_above, compensation, adaptive=adaptive),
            schedule=schedule,
            acknowledgement=acknowledgement_level(acknowledge),
            compression=None if compression is None else find_compression(compression),
            lost_wait_s=lost_wait_s,
            must_fall=loss_must_fall,
        )
        self._refusals = StepRefusals()
        self._clock = StalenessClock(consistency, staleness_bound)
        self._tables = TableExchange(nn.Module())
        self._step = 0
        self._has_state = False
        self._client: ParameterClient | None = None
        self._counts = PushCounts()
        self._losses: LossMonitor | None = None

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        refuse_sparse(self.name, model)
        policy, chosen = self._options.policy, self._options.compression
        spec = self._servers_spec(optimizer)
        spec.staleness.CopyFrom(policy)
        schedule = self._options.schedule
        followed = None
        if schedule is not None and FollowedSchedule.follows(schedule):
            followed = FollowedSchedule(schedule)
        self._shared = SharedModel(
            model=model,
            optimizer=optimizer,
            values=SharedValues(model, optimizer),
            spec=spec,
            gradients=StepGradients(model.parameters(), optimizer),
            compressor=None if chosen is None else PushCompressor(chosen),
            followed=followed,
        )
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "staleness": message_text(policy),
            "schedule": message_text(spec.schedule) or str(followed or "with each push"),
            **self._clock.fields(),
            **self._own_fields(),
        }
        # Members of a release without compression do not send this field.
        if chosen is not None:
            self._fields["compression"] = str(chosen)
        self._tables = TableExchange(model, None if chosen is None else row_codec(chosen.name))
        if self._tables and not self.pushes_rows:
            raise InvalidSpec(
                f"strategy {self.name} does not train embedding tables",
                seen=", ".join(spec.name for spec in self._tables.specs),
                expected="a model without them, or the strategy async-sgd",
            )
        self._fields |= self._tables.fields()
        log.info("staleness_policy_chosen", strategy=self.name, policy=policy_in_words(policy))
        return model, optimizer

    @property
    def schedule_option(self) -> str:
        return "strategy=shoal.AsyncSGD(schedule=...)"

    @property
    def given_schedule(self) -> LRScheduler | None:
        return self._options.schedule

    def _servers_spec(self, optimizer: Optimizer) -> OptimizerSpec:
        return to_spec(optimizer, self._options.schedule)

    def _own_fields(self) -> Mapping[str, str]:
        return {}

    def _rates(self) -> list[float]:
        if self._shared.followed is not None:
            self._shared.followed.step_to(self._num_updates)
        elif self._options.schedule is not None:
            return []
        return [float(group["lr"]) for group in self._shared.optimizer.param_groups]

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def attach(self, context: Context) -> None:
        super().attach(context)
        self._client = ParameterClient(
            context.coordinators,
            context.token,
            timeout_s=context.limits.collective_s or 60.0,
            acknowledgement=self._options.acknowledgement,
        )
        self._clock.attach(context)
        self._tables.attach(context, self._options.acknowledgement)

    def lease_samples(self, order: Order, coordinators: Coordinators) -> Leases:
        samples = SampleClient(
            coordinators,
            self.context.token,
            dataset_size=order.samples_per_epoch,
            num_epochs=order.num_epochs,
        )
        return Leases(samples, order.global_batch_size, round_batches=self.steps_per_round)

    @property
    def steps_per_round(self) -> int:
        """Largest number of steps that are acknowledged together."""
        return 1

    def enter(self, generation: Generation) -> None:
        """Get the values in this member's first generation.

        Raises what `await_servers` and `first_values` raise.
        """
        if self._has_state:
            return
        client = self._connected()

        def is_broken() -> bool:
            return self.context.ended() is not None

        await_servers(
            lambda: client.place(self._shared.values.schema, self._tables.specs),
            limit_s=self.context.limits.join_s,
            is_broken=is_broken,
        )
        self._tables.enter()
        first_values(
            client,
            self._shared.values,
            self._shared.spec,
            creates=generation.rank == 0,
            limit_s=self.context.limits.bring_up_s,
            is_broken=is_broken,
        )
        self._has_state = True
        # Set only now: first values have the time limit of a bring-up.
        client.wait_for_lost(self._options.lost_wait_s)
        self._tables.wait_for_lost(self._options.lost_wait_s)
        if self._num_updates * self.steps_per_round < BEGINNING_UPDATES:
            self._losses = LossMonitor(policy_in_words(self._options.policy), self.watch_counts)

    def abandon(self) -> None:
        """Do nothing: this member has no state of a generation."""

    def begin_step(self) -> None:
        self._shared.gradients.forget()
        self._tables.begin_step()
        if self._clock.begin():
            self._refresh()
        if self._options.policy.HasField("bound"):
            self._refusals.begin(self._shared.model, self._shared.untrained)

    def backward(self, loss: Tensor, weight: float) -> None:
        if self._losses is not None:
            self._losses.add(loss)
        (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]

    @property
    def local_model(self) -> nn.Module:
        return self._shared.model

    @property
    def module(self) -> nn.Module:
        return self._shared.model

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        """Push the gradients.

        Raises StalePush if the step has to be repeated (see `redoes`) or was refused too often, and
        what `ParameterClient.push` raises.
        """
        refuse_changes(self._shared.optimizer, self._shared.spec, self._step)
        gradients = gradients_of(self._shared.values.parameters, self._step)
        rows = self._tables.collect_gradients()
        self._clock.before_push()
        # Before rows are pushed: a gradient that cannot be encoded must not end half of a step.
        encoded = self._encode(gradients)
        # A repeated step has pushed its rows to the tables already.
        step, push_of_rows = None, None
        if rows and not self._refusals.num_redone:
            step = self._connected().joint_step(self._tables.shard_ids(rows))
            push_of_rows = self._tables.start_push(rows, step)
        result = self._push(gradients, encoded, step)
        if push_of_rows is not None:
            with waiting:
                push_of_rows.result()
        if result.stale:
            self._begin_anew(result)
        self._refusals.mark_taken()
        self._clock.pushed()
        # The servers have stepped. Without the mark, torch's schedules warn about a wrong order.
        mark_stepped(self._shared.optimizer)
        self._step += 1
        self._count(result)
        self._watch_loss()
        acknowledged()

    def _watch_loss(self) -> None:
        if self._losses is not None and self._losses.is_due(self._step):
            self._losses.judge_window(self._num_updates)

    @property
    def _num_updates(self) -> int:
        # New shards have version 1.
        return max(self._connected().versions.values(), default=1) - 1

    @property
    def warning(self) -> str:
        return self._losses.warning if self._losses is not None else ""

    def check_result(self) -> None:
        if self._losses is not None:
            self._losses.check(must_fall=self._options.must_fall)

    def _count(self, result: PushResult) -> None:
        self._counts.pushed(result)

    def _encode(self, gradients: Mapping[str, Tensor]) -> EncodedPush | None:
        """Return the gradients by shard as the compressor encodes them; None without one."""
        if self._shared.compressor is None:
            return None
        shards = self._refusals.shards or None
        return self._shared.compressor.encode(self._connected().shard_map, gradients, shards)

    def _push(
        self,
        gradients: Mapping[str, Tensor],
        encoded: EncodedPush | None,
        step: JointStep | None = None,
    ) -> PushResult:
        compensates = self._shared.spec.staleness.kind == "compensate"
        # Copied: a retry must send the same values, but new ones may arrive in between.
        bases = self._shared.values.copies() if compensates else None
        with waiting:
            result = self._connected().push(
                {name: bytes_of(gradient) for name, gradient in gradients.items()},
                lr=self._rates(),
                into=self._shared.values.writable() if self._clock.wants_values else None,
                bases=bases,
                only=self._refusals.shards or None,
                step=step,
                encoded=encoded,
            )
        if self._shared.compressor is not None:
            self._shared.compressor.restore_residuals(result.stale)
        self._counts.rollbacks.compare_versions(self._connected().versions)
        if self._clock.wants_values:
            self._shared.values.adopt()
        return result

    def _begin_anew(self, result: PushResult) -> NoReturn:
        self._refusals.undo_refused_step(result.stale, self._step)
        self._counts.rejected()
        self._refresh()
        self._refusals.raise_refusal(self._step, next(iter(result.stale.values())))

    def redoes(self, error: BaseException) -> bool:
        return isinstance(error, StalePush) and self._refusals.may_redo

    def finish(self) -> None:
        """Get the job's final values."""
        self._clock.rest()
        # Embedding rows that are looked up after this have the present values, too.
        self._tables.forget_rows()
        self._refresh()

    def rest(self) -> None:
        self._clock.rest()

    def _refresh(self) -> None:
        with waiting:
            self._connected().pull(self._shared.values.writable())
        self._counts.rollbacks.compare_versions(self._connected().versions)
        self._shared.values.adopt()

    @property
    def step(self) -> int:
        return self._step

    @property
    def has_state(self) -> bool:
        return self._has_state

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the values that this member computes with, on the host.

        After the last sample these are the job's final values. Buffers are the member's own.
        """
        return state_dict_on_host(self._shared.model)

    def weights(self) -> HeldWeights:
        """Return the present values, whole: one member publishes for all."""
        model = self._shared.model
        return replicated_weights(
            dict(model.named_parameters()),
            persistent_buffers(model),
            step=self._step,
            rank=0,
            world_size=1,
            tied=tied(model),
        )

    def own_weights(self) -> HeldWeights:
        if not self.pushes_rows:
            return super().own_weights()
        model = self._shared.model
        return replicated_weights(
            self._shared.untrained,
            persistent_buffers(model),
            step=self._step,
            rank=0,
            world_size=1,
            tied=tied(model),
        )

    def metrics(self) -> Mapping[str, float]:
        counts = self._counts.metrics()
        if not counts:
            return {}
        traffic = {} if self._shared.compressor is None else self._shared.compressor.metrics()
        return {**counts, **self._clock.metrics(), **self._tables.metrics(), **traffic}

    def close(self) -> None:
        with ExitStack() as releases:
            if self._client is not None:
                releases.callback(self._client.close)
            releases.callback(self._tables.close)
            releases.callback(self._clock.close)

    def _connected(self) -> ParameterClient:
        if self._client is None:
            raise InternalError("the strategy was not attached", expected="attach() before enter()")
        return self._client
