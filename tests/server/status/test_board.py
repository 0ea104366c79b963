"""The board of health and events: what it keeps of each job."""

from support.clusters.status_world import health

from shoal_server.status.board import StatusBoard


def test_a_jobs_losses_are_in_the_order_of_its_steps_after_a_rollback() -> None:
    """Members go back over several reports; the losses of those steps are no longer shown."""
    board = StatusBoard()
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0), (15, 2.5), (25, 1.5)):
        board.report("job", "w0", health("w0", step=step, loss=loss))
    process = health("w0").public_id
    assert list(board.losses("job", "w0", process)) == [(10, 3.0), (15, 2.5), (25, 1.5)]
