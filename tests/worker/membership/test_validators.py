"""A script's own validators: their verdict holds for all members, and comes in bounded time."""

import os
import threading

import pytest
from support.processes.ranks import Ranks
from support.training import rank_bodies
from support.training.rank_bodies import Run

import shoal
from shoal.membership import validators
from shoal.membership.validators import ValidatorSet, validators_of
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import InvalidSpec, ProposalConflict
from shoal_proto.v1 import membership_pb2 as pb

LIMIT_S = 30.0
ROSTER = pb.Roster(
    generation=3,
    step=7,
    planned=True,
    synchronous=True,
    fields={"strategy": "ddp"},
    entries=[
        pb.RosterEntry(member_id="b", rank=1, host="h2", state=pb.STATE_ACTION_RECEIVE),
        pb.RosterEntry(
            member_id="a", rank=0, host="h1", address="10.0.0.1", state=pb.STATE_ACTION_KEEP
        ),
    ],
)


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validators, "REGISTERED", dict(validators.REGISTERED))


def accepts(roster: shoal.Roster) -> None:
    return None


def rejections(function: validators.Validator, limit_s: float = LIMIT_S) -> list[pb.Rejection]:
    return ValidatorSet({"mine": function}, "a").rejections(ROSTER, limit_s)


def test_a_validator_sees_the_roster_and_its_rejection_has_its_name() -> None:
    """The roster has the members by rank, this member's own entry, and the fields on which all
    agree."""
    seen: list[shoal.Roster] = []

    def rejects(roster: shoal.Roster) -> shoal.Reject:
        seen.append(roster)
        return shoal.Reject(seen="1 GB", expected="10 GB", fix="Clear /scratch.")

    answer = pb.Rejection(field="mine", seen="1 GB", expected="10 GB (Clear /scratch.)")
    assert rejections(rejects) == [answer]
    (answer,) = rejections(lambda roster: shoal.Reject(seen=os.fsdecode(b"/data/caf\xe9")))
    assert answer.seen == r"/data/caf\udce9", "a message cannot hold such bytes"
    (roster,) = seen
    assert (roster.generation, roster.step, roster.planned) == (3, 7, True)
    assert (roster.world_size, roster.rank, roster.own.member_id) == (2, 0, "a")
    assert [m.member_id for m in roster.members] == ["a", "b"]
    assert [(m.host, m.address, m.state) for m in roster.members] == [
        ("h1", "10.0.0.1", "keep"),
        ("h2", "", "receive"),
    ]
    assert roster.fields["strategy"] == "ddp"
    with pytest.raises(TypeError):
        roster.fields["strategy"] = "other"  # type: ignore[index]
    assert rejections(accepts) == []


def test_a_validator_that_raises_or_returns_something_else_rejects() -> None:
    """The rejection names the error or the value, for the validator's author. SystemExit does not
    end the process."""

    def raises(roster: shoal.Roster) -> None:
        raise KeyError("scratch")

    def exits(roster: shoal.Roster) -> None:
        raise SystemExit(3)

    assert rejections(raises)[0].seen == "KeyError: 'scratch'"
    assert rejections(exits)[0].seen == "SystemExit: 3"
    assert "returned False" in rejections(lambda roster: False)[0].seen  # type: ignore[arg-type,return-value]


def test_a_validator_that_does_not_end_rejects_in_time_and_is_not_called_again() -> None:
    """The other validators' answers count, and no further thread is started for later rosters."""
    end, asked = threading.Event(), []

    def hangs(roster: shoal.Roster) -> None:
        asked.append(roster)
        end.wait(60)

    def rejects(roster: shoal.Roster) -> shoal.Reject:
        return shoal.Reject(seen="bad")

    judges = ValidatorSet({"b-hangs": hangs, "a-rejects": rejects}, "a")
    answers = {r.field: r.seen for r in judges.rejections(ROSTER, 1.0)}
    assert answers["b-hangs"] == "no answer after 1 s"
    assert answers["a-rejects"] == "bad"
    (again,) = judges.rejections(ROSTER, LIMIT_S)
    assert (again.field, again.seen) == ("b-hangs", "still at work on generation 3")
    assert len(asked) == 1
    end.set()


def test_two_validators_of_one_name_are_refused() -> None:
    """A second function with the same name is refused; registering the same one again is not. A
    session's own validators are added to those."""
    shoal.validator("scratch")(accepts)
    assert shoal.validator("scratch")(accepts) is accepts
    with pytest.raises(InvalidSpec, match=r"two validators have the name 'scratch'.*accepts"):
        shoal.validator("scratch")(rejections)  # type: ignore[type-var]
    with pytest.raises(InvalidSpec, match="'a,b'"):
        shoal.validator("a,b")

    def own(roster: shoal.Roster) -> None:
        return None

    def scratch(roster: shoal.Roster) -> None:
        return None

    assert validators_of([own, accepts]) == {"scratch": accepts, "own": own}
    with pytest.raises(InvalidSpec, match="'scratch'"):
        validators_of([scratch])
    with pytest.raises(InvalidSpec, match="no name"):
        validators_of([lambda roster: None])


def test_a_rejection_of_one_member_is_an_error_on_all(cluster: LocalCluster) -> None:
    """Members do not start. The error, the same on all, names the validator, the member and the
    value that it saw."""
    with Ranks() as ranks:
        crew = [
            ranks.start(
                rank_bodies.train_validated,
                Run(
                    coordinator=cluster.coordinator,
                    job="validators",
                    member_id=name,
                    desired_members=2,
                    fault="rejects" if name == "b" else "",
                ),
            )
            for name in "ab"
        ]
        for rank in crew:
            raised = rank.expect("raised")
            assert raised["error"] == "ProposalConflict"
            assert "scratch: '1 GB' in b but '10 GB' in roster" in raised["text"]
            assert "tried" not in rank.kinds()


def test_a_newcomer_without_the_jobs_validators_is_refused(cluster: LocalCluster) -> None:
    """The newcomer's acceptance would mean less than that of the others, which train on."""
    model, optimizer = rank_bodies.model_and_optimizer()
    own = shoal.join("own-validators", coordinator=cluster.coordinator, validators=[accepts])
    with own as session:
        replica, optimizer = session.distribute(model, optimizer)
        batches = session.batches(rank_bodies.data(), global_batch_size=20)
        batch = next(batches)
        with (
            pytest.raises(ProposalConflict, match=r"validators: '.absent.' in .* but 'accepts'"),
            shoal.join("own-validators", coordinator=cluster.coordinator) as stranger,
        ):
            stranger.distribute(*rank_bodies.model_and_optimizer())
            next(stranger.batches(rank_bodies.data(), global_batch_size=20))
        with session.step() as step:
            session.backward(rank_bodies.loss_of(replica(batch.inputs), batch.targets))
        assert step.committed


class Unprintable(Exception):
    def __str__(self) -> str:
        raise IndexError("no text")

    __repr__ = __str__


def test_a_validator_whose_answer_has_no_text_rejects_like_any_other() -> None:
    """The validators after it run, too."""

    def fails(roster: shoal.Roster) -> None:
        raise Unprintable

    def returns(roster: shoal.Roster) -> shoal.Reject:
        return Unprintable()  # type: ignore[return-value]

    def says(roster: shoal.Roster) -> shoal.Reject:
        return shoal.Reject(seen=Unprintable())  # type: ignore[arg-type]

    def rejects(roster: shoal.Roster) -> shoal.Reject:
        return shoal.Reject(seen="bad")

    judges = ValidatorSet({"a": fails, "b": returns, "c": says, "d": rejects}, "a")
    found = judges.rejections(ROSTER, LIMIT_S)
    assert [each.field for each in found] == ["a", "b", "c", "d"]
    assert all("whose text fails with IndexError" in each.seen for each in found[:3])
