"""Secrets of a member's configuration."""

from shoal_client.membership.member import Member
from shoal_proto.v1 import membership_pb2 as pb


def test_the_text_of_a_member_has_neither_its_incarnation_nor_the_jobs_secret() -> None:
    """The text of an object may be in a log or a traceback. The public id stands for the
    incarnation."""
    member = Member(
        coordinators=(),
        spec=pb.JobSpec(job="digits"),
        member_id="w0",
        incarnation="secret-incarnation",
        info=pb.MemberInfo(),
        job_secret="secret-of-the-job",
    )
    text = f"{member!r} {member.identity!r}"
    assert "w0" in text and member.identity.public_id in text
    assert "secret" not in text.replace("job_secret", "")
