"""Reconfiguration, by torch, of one Gloo group for all generations: with real processes and
signals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.collectives import reconfigured_bodies
from support.members.elastic_schedule import Schedule, check_no_trace, elastic
from support.processes.ranks import Ranks
from support.training import elastic_bodies

import shoal
from shoal.backends.choice import backend_for
from shoal.backends.network.reconfigured import RECONFIGURE_S
from shoal.membership.join_config import JoinConfig, read_config
from shoal.torch_private.c10d import CAN_RECONFIGURE
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-5
"""Limit for fp32 after a few hundred steps; only the order of additions differs."""
NEEDS_RECONFIGURE = pytest.mark.skipif(
    not CAN_RECONFIGURE, reason="torch 2.14 or newer has it: `make test TORCH=2.15.0`"
)


@NEEDS_RECONFIGURE
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("fsdp", {"min_group_bytes": 200}),
        pytest.param("tensor", {"min_split_bytes": 0}, marks=pytest.mark.long),
    ],
)
def test_reconfiguring_a_group_leaves_no_trace_in_the_weights(
    cluster: LocalCluster, tmp_path: Path, strategy: str, options: dict[str, int]
) -> None:
    """The job goes through a kill, a join and a drain. Every generation runs over the one group,
    and no member makes another."""
    run = elastic(cluster, strategy, desired_members=3, strategy=strategy, options=options)
    with Ranks() as ranks:
        schedule = Schedule(ranks, run, tmp_path, seed=5, body=reconfigured_bodies.train)
        schedule.start(3)
        schedule.kill()
        schedule.join()
        schedule.drain()
        check_no_trace(schedule, run, TOLERANCE)
    for rank in schedule.all:
        reconfigured = [data for kind, data in rank.seen if kind == "reconfigured"]
        trained = {data["generation"] for kind, data in rank.seen if kind == "committed"}
        assert trained <= {data["generation"] for data in reconfigured}
        assert len({data["group"] for data in reconfigured}) == 1
    assert max(len([k for k, _ in rank.seen if k == "reconfigured"]) for rank in schedule.all) >= 4


@NEEDS_RECONFIGURE
def test_twenty_generations_of_one_group_neither_freeze_the_process_nor_leak(
    tmp_path: Path,
) -> None:
    """Half of the generations end in the middle of a step."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(reconfigured_bodies.many_generations, path, r, 3, 20) for r in range(3)]
        for rank in crew:
            done = rank.expect("done")
            assert done["descriptors"] < 10  # one group has as many
            assert done["longest_pause_s"] < 10
            assert rank.join() == 0


@NEEDS_RECONFIGURE
@pytest.mark.parametrize("how", ["handle", "before", "behind"])
def test_if_one_member_cannot_reconfigure_all_make_a_new_group(tmp_path: Path, how: str) -> None:
    """The new group is made at once, in that generation; the next generation is reconfigured
    again."""
    with Ranks() as ranks:
        path = str(tmp_path / "store")
        crew = [ranks.start(reconfigured_bodies.one_fails, path, r, 3, how) for r in range(3)]
        for number, rank in enumerate(crew):
            stands = [rank.expect("stands") for _ in range(3)]
            assert [each["reconfigured"] for each in stands] == [True, False, True]
            assert [each["total"] for each in stands] == [3.0] * 3
            assert {each["size"] for each in stands} == {(number, 3)}
            assert max(each["seconds"] for each in stands) < RECONFIGURE_S
            assert rank.join() == 0


@NEEDS_RECONFIGURE
def test_members_that_do_not_all_reconfigure_are_refused(cluster: LocalCluster) -> None:
    run = elastic(cluster, "mixed", desired_members=2, stop_file="/nonexistent")
    with Ranks() as ranks:
        crew = [
            ranks.start(elastic_bodies.train, replace(run, member_id=name, reconfigure=on))
            for name, on in (("a", True), ("b", False))
        ]
        raised = [rank.expect("raised") for rank in crew]
        assert {each["error"] for each in raised} == {"ProposalConflict"}
        assert all("reconfigure" in each["text"] for each in raised)


def test_reconfigure_is_refused_with_a_torch_that_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.backends.choice.CAN_RECONFIGURE", False)
    with pytest.raises(InvalidSpec, match="reconfigure") as refused:
        shoal.join("digits", reconfigure=True)
    assert torch.__version__ in refused.value.seen
    assert refused.value.expected == "torch 2.14 or newer"


@pytest.mark.parametrize("backend", ["nccl", "in-memory"])
def test_reconfigure_is_refused_with_backends_other_than_gloo(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.backends.choice.CAN_RECONFIGURE", True)
    with pytest.raises(InvalidSpec, match=backend):
        JoinConfig(job="digits", coordinators=(), backend=backend, reconfigure=True)
    with pytest.raises(InvalidSpec, match="nccl"):
        backend_for("cuda", reconfigures=True)


def test_a_strategy_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.backends.choice.CAN_RECONFIGURE", True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        shoal.join("digits", reconfigure=True) as session,
        pytest.raises(InvalidSpec, match="async-sgd has no process group"),
    ):
        session.distribute(model, optimizer, strategy="async-sgd")


def test_reconfigure_can_be_set_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.backends.choice.CAN_RECONFIGURE", True)
    assert not read_config({}, {}).reconfigure
    assert read_config({}, {"SHOAL_RECONFIGURE": "1"}).reconfigure
    assert not read_config({"reconfigure": False}, {"SHOAL_RECONFIGURE": "1"}).reconfigure
    with pytest.raises(InvalidSpec, match="SHOAL_RECONFIGURE"):
        read_config({}, {"SHOAL_RECONFIGURE": "perhaps"})
