"""The board of health and events: what it keeps of each job."""

from support.clusters.status_world import health

from shoal_proto.health import CourseFigures
from shoal_server.status.board import MAX_JOBS, MAX_MEMBERS, StatusBoard
from shoal_server.status.history.series import Reading


def test_a_jobs_losses_are_in_the_order_of_its_steps_after_a_rollback() -> None:
    """Members go back over several reports; the losses of those steps are no longer shown."""
    board = StatusBoard()
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0), (15, 2.5), (25, 1.5)):
        board.report("job", "w0", health("w0", step=step, loss=loss))
    process = health("w0").public_id
    assert list(board.losses("job", "w0", process)) == [(10, 3.0), (15, 2.5), (25, 1.5)]


def test_steps_of_very_many_members_are_counted_once() -> None:
    """More members report than the board keeps reports of."""
    board = StatusBoard()
    for step in (10, 20, 30):
        for number in range(MAX_MEMBERS + 10):
            board.report("job", f"w{number}", health(f"w{number}", step=step))
        assert board.total_steps("job") == step * (MAX_MEMBERS + 10)
        process = health("w0").public_id
        assert board.health("job", "w0", process) is None
        assert board.reported_step("job", "w0", process) == step
    assert board.highest_step("job") == 30


def test_no_board_of_a_live_job_is_dropped() -> None:
    ended: set[str] = set()
    board = StatusBoard(is_live=lambda job: job not in ended)
    jobs = [f"job-{number}" for number in range(MAX_JOBS + 10)]
    for job in jobs:
        board.event(job, "phase_running", "it trains")
    assert all(board.events(job) for job in jobs)
    ended.update(jobs[5:30])
    board.event("another", "phase_running", "it trains")
    assert [job for job in jobs if not board.events(job)] == jobs[5:16]
    assert board.events("another")


def test_ended_jobs_are_kept_up_to_a_bound() -> None:
    board = StatusBoard()
    for number in range(MAX_JOBS + 1):
        board.event(f"job-{number}", "member_joined", "it asked")
    assert not board.events("job-0")
    assert board.events("job-1")


def test_ids_of_events_rise_from_leader_to_leader() -> None:
    """Also if the next leader's process is older than the first one's: a reader that asks for
    events after the last one gets them."""
    now_s = 1_700_000_000.0
    older = StatusBoard(lambda: now_s)
    now_s += 60
    newer = StatusBoard(lambda: now_s)
    last = [newer.event("job", "member_joined", "it asked").id for _ in range(3)][-1]
    now_s += 1
    older.event("job", "member_joined", "it asked")
    assert len(older.events("job", after=last)) == 1


def test_events_of_a_leader_whose_clock_is_behind_are_not_missed() -> None:
    """Its first events have lower ids than the last one of the leader before. Events of its own
    earlier terms are not repeated."""
    ahead, behind = StatusBoard(lambda: 1005.0), StatusBoard(lambda: 1000.0)
    behind.event("job", "member_joined", "w0, in an earlier term")
    behind.end_term()
    last = ahead.event("job", "member_joined", "w1").id
    assert not behind.events("job", after=last)
    taken = behind.event("job", "leader_took_over", "it leads")
    assert list(behind.events("job", after=last)) == [taken]
    assert not behind.events("job", after=taken.id)


def test_all_times_of_a_board_are_of_one_clock() -> None:
    """They are shown as ages, and beside each other in charts."""
    board = StatusBoard(clock=lambda: 7.0)
    assert board.event("job", "member_joined", "w0").unix_s == 7.0
    board.snapshot_taken("job", "snapshot 1")
    assert board.snapshot_unix_s("job") == 7.0
    board.measured("job", Reading(generation=1, step=1))
    kept = board.history("job")
    assert kept is not None
    view = kept[1].view()
    assert 7.0 - view.interval_s < view.unix_s[0] <= 7.0


def test_the_snapshot_of_an_earlier_run_or_term_is_not_shown() -> None:
    """The next run is not restored from it, and another leader may have taken newer ones."""
    board = StatusBoard(clock=lambda: 7.0)
    board.snapshot_taken("job", "snapshot 1")
    board.reset_reports("job")
    assert board.snapshot_unix_s("job") is None


def test_the_length_of_a_job_is_that_of_the_newest_report() -> None:
    """Members that resume a job with larger batches take fewer steps than the gone ones, and may
    write no checkpoints."""
    board = StatusBoard()
    for name, num_steps in (("old", 1000), ("new", 500)):
        course = CourseFigures(num_steps=num_steps, writes_checkpoints=name == "old")
        board.report("job", name, health(name, course=course))
    assert board.num_steps("job") == 500
    assert board.writes_checkpoints("job") is False
