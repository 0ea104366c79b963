"""Members that split layers wait for each other forever if one leaves a layer out. They are refused
at once, with the layer at which each waits, instead of breaking at a time limit again and again."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from support.members import leaving_out
from support.members.leaving_out import LeavingOut
from support.network import http
from support.network.gates import Network
from support.network.namespaces import Cut, Loss, RoutedHosts, why_unavailable
from support.processes.ranks import Ranks
from support.processes.served_process import awaited

from shoal_client.local.cluster import LocalCluster

pytestmark = pytest.mark.long

WAIT_S = 60.0
TENSOR = {"min_split_bytes": 0}
HYBRID = {"pipeline": 1, "tensor": 2, "min_split_bytes": 0}


@pytest.mark.parametrize("left_out", [frozenset({1}), frozenset({1, 2})], ids=["one", "the rest"])
@pytest.mark.parametrize(
    ("options", "names", "in_evaluation"),
    [(TENSOR, "ab", False), (TENSOR, "ab", True), (TENSOR, "abcd", False), (HYBRID, "abcd", False)],
    ids=["tensor", "tensor in an evaluation", "tensor of four", "hybrid"],
)
def test_a_layer_that_one_member_leaves_out_is_refused_by_all_of_them(
    cluster: LocalCluster,
    options: Mapping[str, int],
    names: str,
    in_evaluation: bool,
    left_out: frozenset[int],
) -> None:
    """The refusal comes in the generation in which the layer is left out. Regression: each
    generation broke by the limit of a collective, and the next one took the same step again,
    without end."""
    strategy = "hybrid" if options is HYBRID else "tensor"
    for each in refused(cluster, (strategy, options), names, left_out, in_evaluation):
        assert "split layers among them computed with different layers" in each
        assert "a: at the outputs of blocks.1.2" in each
        other = "outer" if 2 in left_out else "blocks.2.2"
        assert f"b: at the outputs of {other}" in each


@pytest.mark.parametrize("in_evaluation", [False, True], ids=["in a step", "in an evaluation"])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (("fsdp-tensor", {"tensor": 2, "min_split_bytes": 0, "min_group_bytes": 0}), (1, 3)),
        (("hsdp", {"shard": 2, "min_group_bytes": 0}), (0, 1)),
    ],
    ids=["fsdp-tensor", "hsdp"],
)
def test_members_that_do_not_gather_with_the_differing_one_are_refused_too(
    cluster: LocalCluster,
    strategy: tuple[str, Mapping[str, int]],
    ranks: tuple[int, int],
    in_evaluation: bool,
) -> None:
    """Regression: these members waited for others to come, or trained on with those that came
    back."""
    refusals = refused(cluster, strategy, "abcd", frozenset({1}), in_evaluation)
    assert len(set(refusals)) == 1
    assert "computed with different layers at the same time" in refusals[0]
    for rank in ranks:
        assert f"rank {rank}: at the weights of the layer of" in refusals[0]


def refused(
    cluster: LocalCluster,
    strategy: tuple[str, Mapping[str, int]],
    names: str,
    left_out: frozenset[int],
    in_evaluation: bool,
) -> list[str]:
    """Return the refusal of each member, in the generation in which b leaves something out."""
    run = LeavingOut(
        coordinator=cluster.coordinator,
        job=f"left-out-{secrets.token_hex(4)}",
        member_id="",
        strategy=strategy[0],
        options=strategy[1],
        min_members=len(names),
        desired_members=len(names),
        batch_size=24,
        at_step=2,
        in_evaluation=in_evaluation,
    )
    with Ranks() as ranks:
        members = [
            ranks.start(
                leaving_out.train,
                replace(run, member_id=name, left_out=left_out if name == "b" else frozenset()),
            )
            for name in names
        ]
        refusals = [member.expect("refused") for member in members]
    assert [each["generation"] for each in refusals] == [1] * len(names)
    return [each["text"] for each in refusals]


@pytest.fixture
def hosts() -> Iterator[RoutedHosts]:
    if why := why_unavailable():
        pytest.skip(why)
    with RoutedHosts() as hosts:
        yield hosts


@pytest.mark.parametrize("directions", [1, 2], ids=["one way", "both ways"])
def test_members_that_are_cut_off_from_each_other_are_not_refused(
    quick: LocalCluster, hosts: RoutedHosts, directions: int
) -> None:
    """The members are cut off for longer than a collective may take, while both reach the
    coordinator: a waiting member reports for which layers it has met the other. They train on once
    they reach each other again."""
    job = f"cut-off-{secrets.token_hex(4)}"
    run = LeavingOut(
        coordinator="",
        job=job,
        member_id="",
        strategy="tensor",
        options=TENSOR,
        min_members=2,
        desired_members=2,
        batch_size=24,
    )
    with Network() as network, Ranks() as ranks:
        # Without TLS a coordinator listens on loopback only.
        (coordinator,) = network.wire(quick.coordinator, address=hosts.here.address).endpoints
        members = []
        for name in "ab":
            host = hosts.add(name)
            where = {"host": name, "address": host.address, "coordinator": coordinator}
            own = replace(run, member_id=name, **where)
            members.append(ranks.start(leaving_out.train_on, host, own))
        for member in members:
            member.expect("stepped")
        ways = [("a", "b"), ("b", "a")][:directions]
        hosts.cut([Cut(source=a, target=b, loss=Loss.DROPPED) for a, b in ways])
        events = f"{quick.http_url}/api/v1/jobs/{job}/events"
        awaited(lambda: "a collective did not finish" in http.get(events).text, WAIT_S, "a hang")
        hosts.restore()
        for member in members:
            while member.expect_any("stepped", "refused")[1]["generation"] == 1:
                pass
            assert "refused" not in member.kinds()
