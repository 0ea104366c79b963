"""Members in the script's own code are shown as the cause if others wait for them."""

from support.members.job_world import World

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership import events
from shoal_server.status.from_core import JobReader


def test_a_member_that_waits_for_another_in_its_own_code_names_it() -> None:
    """The reason is shown if the member has been there for 54 s, but not after 1 s."""
    w = World(JobSpec(job="j", min_members=1, max_members=8, desired_members=2))
    for name in ("a", "b"):
        w.join(name)
    w.run(1.0)
    who = {"member_id": "a", "incarnation": w.members["a"].incarnation}
    w.job.heartbeat(events.HeartbeatReceived(**who, own_code_s=54.0), 100.0)
    reader = JobReader(job=w.job, now_s=100.0)
    views = [entry.member for entry in reader.detail().members]
    listed = {each.member_id: each.waiting_for for each in views}
    assert listed == {
        "a": "nothing: it has been in your code for 54 s",
        "b": "a, which has been in your code for 54 s",
    }
    assert reader.member(w.job.members["b"]).waiting_for == listed["b"]
    w.job.heartbeat(events.HeartbeatReceived(**who, own_code_s=1.0), 101.0)
    views = [entry.member for entry in JobReader(job=w.job, now_s=101.0).detail().members]
    assert {each.waiting_for for each in views} == {"nothing: it trains"}
