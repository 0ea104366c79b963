"""Members that split layers wait for each other for ever where one leaves a layer out: they are
told of which layer each is, at once, and not by a limit after which all of it comes again."""

import secrets
from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.members import leaving_out
from support.members.leaving_out import LeavingOut
from support.processes.ranks import Ranks

from shoal_client.local.cluster import LocalCluster

pytestmark = pytest.mark.long

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
    """In the generation in which it is left out. Regression: each generation broke by the limit of
    a collective, and the next one took the same step again, without end."""
    run = LeavingOut(
        coordinator=cluster.coordinator,
        job=f"left-out-{secrets.token_hex(4)}",
        member_id="",
        strategy="hybrid" if options is HYBRID else "tensor",
        options=options,
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
        told = [member.expect("refused") for member in members]
        assert [each["generation"] for each in told] == [1] * len(names)
        for each in told:
            assert "split layers among them computed with different layers" in each["text"]
            assert "a: at the outputs of blocks.1.2" in each["text"]
            other = "outer" if 2 in left_out else "blocks.2.2"
            assert f"b: at the outputs of {other}" in each["text"]
