"""The cases by name, most important first: if time runs out, the last ones are not run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpu.case import Case
from gpu.cases import equality, growth, losses, members, plain, state, timing


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A case: its function and its limit."""

    title: str
    run: Callable[[Case], None]
    """The function of the case, which fails by an exception."""
    limit_s: float
    """Limit on a GPU. A case that takes longer fails."""
    kills: bool = False
    """True if the case ends or stops processes in the middle of their work on a GPU: they share it
    without MPS, which a killed client may take down."""


CASES: Mapping[str, Entry] = {
    "N": Entry(title="plain NCCL with 1, 2 and 4 ranks", run=plain.collectives, limit_s=40),
    "O1": Entry(title="a step beside plain DDP's", run=timing.overhead, limit_s=90),
    "E2": Entry(title="every strategy, 2 ranks", run=equality.of_two, limit_s=60),
    "E4": Entry(title="every strategy, 4 ranks", run=equality.of_four, limit_s=75),
    "K1": Entry(title="kills in backward", run=losses.in_backward, limit_s=60, kills=True),
    "K2": Entry(title="kills in the bring-up", run=losses.in_bring_up, limit_s=60, kills=True),
    "P": Entry(title="a pipeline with a tied embedding", run=equality.tied, limit_s=40),
    "B": Entry(
        title="a kill in a round of local SGD and DiLoCo",
        run=losses.in_exchange,
        limit_s=45,
        kills=True,
    ),
    "K3": Entry(title="a stopped member", run=losses.stopped, limit_s=60, kills=True),
    "K4": Entry(title="a stopped member of HSDP", run=losses.stopped_hsdp, limit_s=60, kills=True),
    "K5": Entry(title="FSDP from copies at peers", run=losses.from_copies, limit_s=60, kills=True),
    "J": Entry(title="a join and a drain by the commands", run=members.join_and_drain, limit_s=60),
    "L": Entry(title="growth over 50 generations", run=growth.over_generations, limit_s=90),
    "A": Entry(title="a scaler and an Inf", run=equality.infinite, limit_s=40),
    "C": Entry(title="checkpoints while training", run=state.checkpoints, limit_s=45, kills=True),
    "T": Entry(title="torch.compile over a change", run=equality.compiled, limit_s=75, kills=True),
    "F": Entry(title="CPU offload", run=equality.offloaded, limit_s=40, kills=True),
    "S": Entry(title="async-sgd and ssp", run=state.asynchronous, limit_s=45, kills=True),
    "E1": Entry(title="every strategy, 1 rank", run=equality.of_one, limit_s=45),
    "O2": Entry(title="steps of small layers", run=timing.small_layers, limit_s=40),
}

__all__ = ["CASES", "Entry"]
