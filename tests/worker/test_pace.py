"""Members with bounded pace: the values that they compute on, and the members for which they
wait."""

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from support.clusters.parameter_servers import ParameterServers, servers_fixture
from support.members.async_members import new_model, start, train
from torch import Tensor, nn

from shoal.strategies import find_strategy
from shoal.strategies.asynchronous.async_sgd import AsyncSGD
from shoal.strategies.asynchronous.bounded_staleness import BSP, SSP
from shoal.strategies.asynchronous.staleness_clock import StalenessClock
from shoal_proto.errors import InvalidSpec

DEADLINE_S = 60.0
LR = 0.125


servers = servers_fixture(2)


class Whole(nn.Module):
    """A model with one weight of whole numbers, so that sums are the same in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))


def step_on(
    strategy: AsyncSGD, model: Whole, gradient: float, begun: Callable[[], object] = lambda: None
) -> Tensor:
    """Take a step with a uniform gradient; return the weight on which it was computed."""
    strategy.begin_step()
    begun()
    seen = model.weight.detach().clone()
    strategy.backward((model.weight * gradient).sum(), 1.0)
    strategy.end_step(lambda: None)
    return seen


def begin(servers: ParameterServers, rank: int, strategy: AsyncSGD) -> tuple[AsyncSGD, Whole]:
    model = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return start(servers, model, optimizer, rank=rank, strategy=strategy), model


def test_under_bsp_all_members_compute_each_round_on_the_same_values(
    servers: ParameterServers,
) -> None:
    """Values include every push of earlier rounds, and none of this round."""
    num_members, num_rounds = 3, 12
    members = [begin(servers, rank, BSP(staleness="none")) for rank in range(num_members)]
    seen: list[list[Tensor]] = [[] for _ in members]
    # No member waits for one that has not begun; a session finishes when all samples are done.
    all_begun, all_done = threading.Barrier(num_members), threading.Barrier(num_members)

    def work(rank: int) -> None:
        strategy, model = members[rank]
        gradient = 8.0 * (rank + 1)
        seen[rank].append(step_on(strategy, model, gradient, all_begun.wait))
        seen[rank] += [step_on(strategy, model, gradient) for _ in range(num_rounds - 1)]
        strategy.rest()
        all_done.wait()
        strategy.finish()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(num_rounds):
        # Each round subtracts 0.125 * 8 * (1 + 2 + 3).
        expected = torch.full((1000,), -6.0 * number)
        assert all(torch.equal(each[number], expected) for each in seen), number
    for strategy, model in members:
        assert torch.equal(model.weight, torch.full((1000,), -6.0 * num_rounds))
        strategy.close()


@pytest.mark.parametrize("end", ["steps", "dies", "rests"])
def test_no_member_gets_further_ahead_than_the_bound(servers: ParameterServers, end: str) -> None:
    """The fast member goes on once the slow one has stepped, died or run out of samples."""
    bound = 2
    fast, model = begin(servers, 0, SSP(staleness_bound=bound, staleness="none"))
    slow, other = begin(servers, 1, SSP(staleness_bound=bound, staleness="none"))
    slow.begin_step()
    steps: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def work() -> None:
        for _ in range(bound + 2):
            steps.put(step_on(fast, model, 8.0))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(bound + 1):
        steps.get(timeout=DEADLINE_S)
    await_reason(servers)
    assert steps.empty()
    if end == "steps":
        slow.backward((other.weight * 80.0).sum(), 1.0)
        slow.end_step(lambda: None)
        slow.begin_step()
    elif end == "dies":
        servers.expel("w1")
    else:
        slow.rest()
    newest = steps.get(timeout=DEADLINE_S)
    thread.join()
    assert newest[0].item() == -1.0 * (bound + 1) - (10.0 if end == "steps" else 0.0)
    fast.close()
    slow.close()


def await_reason(servers: ParameterServers) -> None:
    """Wait until the fast member is refused its next step, with the reason."""
    deadline = threading.Event()
    timer = threading.Timer(DEADLINE_S, deadline.set)
    timer.start()
    while not (waiting := servers.clocks.waiting("job")):
        assert not deadline.wait(0.005), "nobody waits"
    timer.cancel()
    assert waiting["w0"][0] == "w1 in round 0: the waiting member's next round is 3, the bound 2"


@pytest.mark.parametrize("strategy", [BSP(), SSP(staleness_bound=0)])
def test_a_member_alone_trains_as_without_a_bound(
    servers: ParameterServers, strategy: AsyncSGD
) -> None:
    """The weights are equal bit for bit, and the member waits for no other."""
    model, free = new_model(), new_model()
    bounded = start(servers, model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    plain = start(servers, free, torch.optim.SGD(free.parameters(), lr=0.1), job="plain")
    assert train(bounded, model, range(5)) == train(plain, free, range(5)) == 5
    bounded.finish()
    for seen, wanted in zip(model.parameters(), free.parameters(), strict=True):
        assert torch.equal(seen, wanted)
    assert bounded.metrics()["round"] == 5
    bounded.close()
    plain.close()


def test_members_must_agree_on_their_consistency() -> None:
    """The field is part of the proposal, and differs between all consistencies that behave
    differently."""
    kinds = [AsyncSGD(), SSP(), SSP(staleness_bound=1), BSP(), find_strategy("ssp")]
    values = []
    for kind in kinds:
        model = new_model()
        kind.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        values.append(kind.fields()["consistency"])
    assert values == ["async", "ssp(4)", "ssp(1)", "bsp", "ssp(4)"]


@pytest.mark.parametrize(
    ("consistency", "bound"), [("sometimes", None), ("async", 3), ("bsp", 0), ("ssp", -1)]
)
def test_options_that_contradict_each_other_are_refused(consistency: str, bound: int) -> None:
    """The error has the value seen and the values that exist."""
    with pytest.raises(InvalidSpec, match=r"async|consistency='ssp'"):
        StalenessClock(consistency, bound)
