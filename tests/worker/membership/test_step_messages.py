"""Members of a generation tell each other of a step in a form that all of them know."""

import pytest
import torch.distributed as dist

from shoal.membership.generation import Generation
from shoal.membership.step_messages import FIELD, FormFinding, StepMessages, refuse_earlier
from shoal_proto.errors import InvalidSpec
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

PRESENT, EARLIER = StepMessages.PRESENT, StepMessages.EARLIER


def generation(world_size: int, *, told: int = 0, **fields: str) -> Generation:
    entries = [pb.RosterEntry(member_id=f"m{n}", rank=n) for n in range(world_size)]
    roster = pb.Roster(generation=3, entries=entries, fields=fields, step_messages=told)
    return Generation(record=pb.GenerationRecord(roster=roster), token=Token(member_id="m0"))


def found_by(present: int, generation: Generation) -> set[StepMessages]:
    """By so many members of now; the others of the generation say nothing."""
    store = dist.HashStore()
    findings = [FormFinding(generation, store) for _ in range(present)]
    for each in findings:
        each.announce()
    return {each.form() for each in findings}


@pytest.mark.parametrize("told", [PRESENT, EARLIER, PRESENT + 1])
def test_what_the_roster_says_holds_and_nobody_asks(told: int) -> None:
    roster = generation(3, told=told)
    finding = FormFinding(roster, None)
    finding.announce()
    expected = {PRESENT} if told > EARLIER else {EARLIER}
    assert found_by(2, roster) == expected


@pytest.mark.parametrize(("present", "form"), [(3, PRESENT), (2, EARLIER), (1, EARLIER)])
def test_under_a_coordinator_that_does_not_say_members_find_out(
    present: int, form: StepMessages
) -> None:
    assert found_by(present, generation(3)) == {form}


def test_the_form_is_the_present_one_where_others_were_refused() -> None:
    assert found_by(1, generation(3, **{FIELD: "2"})) == {PRESENT}


def test_who_is_alone_tells_nobody() -> None:
    assert found_by(1, generation(1)) == {PRESENT}


def test_what_the_earlier_form_cannot_tell_is_refused_by_name() -> None:
    refuse_earlier(PRESENT, "session.evaluate")
    with pytest.raises(InvalidSpec, match=r"session\.evaluate beside members of release 0\.1\.0"):
        refuse_earlier(EARLIER, "session.evaluate")
