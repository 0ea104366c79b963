"""Data parallel: every member holds the whole model; gradients are averaged in each step."""

import threading
import time
from collections.abc import Callable, Mapping

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.backends.base import Backend, Group, Seat
from shoal.backends.gloo import GlooBackend
from shoal.rendezvous import RendezvousStore
from shoal.strategies.base import (
    Context,
    Generation,
    State,
    Strategy,
    optimizer_digest,
    schema_digest,
)
from shoal.strategies.gradients import GradientExchange
from shoal.strategies.replica import replica_of
from shoal.strategies.state import ReplicatedState
from shoal.strategies.transfer import receive, send
from shoal_client.channel import Coordinators
from shoal_proto.errors import (
    GenerationBroken,
    InternalError,
    InvalidSpec,
    UnsupportedOptimizer,
)
from shoal_proto.v1 import membership_pb2 as pb

log = structlog.get_logger(__name__)

LOOPBACK = "127.0.0.1"
STUCK_AFTER_S = 1.0
"""A collective of a group that is cut ends within milliseconds, or (Gloo) only at its limit."""


class DDP(Strategy):
    """Strategy "ddp", on torch's DistributedDataParallel, which is made anew each generation.

    `bucket_mb`: gradients travel in buckets of this size while backward still runs.
    `find_unused_parameters`: for models in which some parameters get no gradient in some steps.
    """

    name = "ddp"
    synchronous = True

    def __init__(self, *, bucket_mb: float = 25.0, find_unused_parameters: bool = False) -> None:
        if not bucket_mb > 0:
            raise InvalidSpec("bucket_mb is out of range", seen=f"{bucket_mb}", expected="above 0")
        self._bucket_mb = bucket_mb
        self._find_unused_parameters = find_unused_parameters
        self._backend: Backend = GlooBackend()
        self._lock = threading.Lock()
        self._cut_up_to = 0
        self._number = 0
        self._group: Group | None = None
        self._ddp: DistributedDataParallel | None = None
        self._exchange: GradientExchange | None = None
        self._process_group: dist.ProcessGroup | None = None
        self._coordinators: Coordinators | None = None
        self._step = 0
        self._has_state = False
        self._in_step = False
        self._weighted = False
        self._buffers: list[Tensor] = []

    def distribute(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedOptimizer(
                "ddp cannot run LBFGS",
                seen="an optimizer that calls the loss several times a step",
                expected="one that uses each gradient once, such as SGD or AdamW",
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidSpec(
                "the model has nothing to train", expected="a parameter that requires a gradient"
            )
        self._state = ReplicatedState(model, optimizer)
        self._fields = {
            "schema": schema_digest(model),
            "optimizer": optimizer_digest(optimizer),
            "backend": self._backend.name,
        }
        self._model, self._optimizer = model, optimizer
        return replica_of(model, self._route), optimizer

    def fields(self) -> Mapping[str, str]:
        return self._fields

    def attach(self, context: Context) -> None:
        super().attach(context)
        self._coordinators = Coordinators(context.coordinators)

    # --- generations ---

    def enter(self, generation: Generation) -> None:
        started_s = time.perf_counter()
        group = self._new_group(generation)
        try:
            process_group = group.open()
            opened_s = time.perf_counter()
            self._align(generation, process_group)
            aligned_s = time.perf_counter()
            self._wrap(process_group)
        except RuntimeError as error:
            if self._cut_up_to >= generation.number:
                raise GenerationBroken(
                    f"generation {generation.number} ended while it was brought up",
                    seen=str(error),
                ) from None
            raise
        self._has_state = True
        log.info(
            "generation_entered",
            generation=generation.number,
            rank=generation.rank,
            world_size=generation.world_size,
            step=self._step,
            connect_s=round(opened_s - started_s, 4),
            state_s=round(aligned_s - opened_s, 4),
            wrap_s=round(time.perf_counter() - aligned_s, 4),
        )

    def cut(self, generation: int) -> None:
        with self._lock:
            self._cut_up_to = max(self._cut_up_to, generation)
            group = self._group if self._number <= generation else None
        if group is not None:
            reason = f"generation {generation} is over"
            group.cut(reason)
            self._watch_for_stuck(group, reason)

    def _watch_for_stuck(self, group: Group, reason: str) -> None:
        """Free the trainer if Gloo does not end what it was doing, though its group is cut."""
        exchange = self._exchange
        if exchange is None:
            return

        def give_up() -> None:
            if exchange.waits:
                log.warning("collective_stuck", reason=reason)
                group.keep_for_ever()
                exchange.give_up(reason)

        timer = threading.Timer(STUCK_AFTER_S, give_up)
        timer.daemon = True
        timer.start()

    def abandon(self) -> None:
        if self._in_step:
            self._in_step = False
            for buffer, before in zip(self._model.buffers(), self._buffers, strict=True):
                buffer.detach().copy_(before)
        self._buffers = []
        self._optimizer.zero_grad(set_to_none=True)
        ddp, self._ddp, self._exchange, self._process_group = self._ddp, None, None, None
        if ddp is not None:
            # Whoever still holds the wrapper (a traceback, say) must not hold the reducer: it has
            # hooks on the parameters, and it would join Gloo's threads if it were last to go.
            del ddp.logger, ddp.reducer
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.retire()

    def _new_group(self, generation: Generation) -> Group:
        limits, me = self.context.limits, generation.me
        peers = generation.record.roster.entries
        one_host = len({(entry.host, entry.address) for entry in peers}) == 1
        seat = Seat(
            generation=generation.number,
            rank=generation.rank,
            world_size=generation.world_size,
            address=LOOPBACK if one_host else me.address,
            bring_up_s=limits.bring_up_s,
            collective_s=limits.collective_s,
        )
        assert self._coordinators is not None, "attach comes before enter"
        store = RendezvousStore(self._coordinators, generation.token, timeout_s=limits.bring_up_s)
        with self._lock:
            self._group = group = self._backend.group(seat, store)
            self._number = generation.number
            over = self._cut_up_to >= generation.number
        if over:
            group.cut(f"generation {generation.number} is over")
        return group

    @torch.no_grad()
    def _align(self, generation: Generation, group: dist.ProcessGroup) -> None:
        """Give every member the state of the source. Also the generation's first collective."""
        entries = generation.entries
        source_id = generation.record.roster.source_member_id or entries[0].member_id
        source = next(entry.rank for entry in entries if entry.member_id == source_id)
        receivers = [
            entry.rank
            for entry in entries
            if entry.rank != source and entry.state != pb.STATE_ACTION_KEEP
        ]
        if generation.rank == source and receivers:
            send(self._state.collect(self._step), receivers, group)
        elif generation.rank in receivers:
            state = receive(source, group)
            self.restore(state)
        steps = torch.zeros(generation.world_size, dtype=torch.int64)
        steps[generation.rank] = self._step
        dist.all_reduce(steps, group=group)
        if len(set(steps.tolist())) != 1:
            raise InternalError(
                f"the members of generation {generation.number} stand at different steps",
                seen=str(steps.tolist()),
                expected=f"all at step {steps[source]} of rank {source}",
            )

    def _wrap(self, group: dist.ProcessGroup) -> None:
        # Everybody has the source's state already: DDP need not compare and send it once more.
        self._ddp = DistributedDataParallel(
            self._model,
            process_group=group,
            init_sync=False,
            bucket_cap_mb=self._bucket_mb,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._find_unused_parameters,
        )
        self._process_group = group
        self._exchange = GradientExchange(group, self._state.name_of)
        self._ddp.register_comm_hook(None, self._exchange.average)

    # --- steps ---

    def begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        self._in_step, self._weighted = True, False
        if self._exchange is not None:
            self._exchange.begin()

    def _route(self) -> nn.Module:
        """DDP within a step; else the plain model, so that evaluating needs no other member."""
        if self._in_step and self._ddp is not None and torch.is_grad_enabled():
            return self._ddp
        return self._model

    def backward(self, loss: Tensor, weight: float) -> None:
        self._weighted = True
        (loss * weight).backward()  # type: ignore[no-untyped-call]

    def end_step(self, acknowledged: Callable[[], None]) -> None:
        if self._exchange is None:
            raise GenerationBroken(f"step {self._step} was begun outside any generation")
        if not self._weighted:
            raise InvalidSpec(
                f"step {self._step} has no session.backward(loss)",
                seen="no backward pass, or a plain loss.backward()",
                expected="session.backward(loss) once or more, which weighs this member's share",
            )
        if not self._exchange.complete:
            raise self._not_averaged()
        self._exchange.check(self._step)
        self._optimizer.step()
        self._step += 1
        self._in_step, self._buffers = False, []
        acknowledged()
        self._backend.tidy()

    def _not_averaged(self) -> InvalidSpec:
        """Why some gradients are this member's alone: the step would let the members drift."""
        names = [
            self._state.name_of(parameter)
            for parameter in self._model.parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if names:
            return InvalidSpec(
                f"parameters without a gradient in step {self._step}",
                seen=", ".join(names[:5]),
                expected="every parameter to take part in the loss",
                fix="If the model leaves some out on purpose: "
                "session.distribute(..., strategy=shoal.DDP(find_unused_parameters=True)).",
            )
        return InvalidSpec(
            f"the gradients of step {self._step} were not averaged",
            seen="a loss that the distributed model did not compute",
            expected="the model that session.distribute returned to be called in the step",
        )

    def finish(self) -> None:
        if self._process_group is None:
            raise GenerationBroken("the last step was taken in a generation that is over")
        dist.all_reduce(torch.zeros(1), group=self._process_group)

    def is_failure(self, error: BaseException) -> bool:
        return self._backend.is_failure(error)

    # --- state ---

    @property
    def step(self) -> int:
        return self._step

    @property
    def has_state(self) -> bool:
        return self._has_state

    def capture(self) -> State:
        return self._state.capture(self._step)

    def restore(self, state: State) -> None:
        self._state.restore(state)
        self._step = state.step

    def close(self) -> None:
        if self._group is not None:
            self.abandon()
        if self._coordinators is not None:
            self._coordinators.close()
            self._coordinators = None


__all__ = ["DDP"]
