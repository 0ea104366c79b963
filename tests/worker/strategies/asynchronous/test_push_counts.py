"""Reports of a member on its pushes."""

from structlog.testing import capture_logs

from shoal.strategies.asynchronous.push_counts import RollbackWatch


def test_shards_that_went_back_are_logged_once() -> None:
    """The line names all shards and how far they went back; training continues from there."""
    watch = RollbackWatch()
    with capture_logs() as logs:
        watch.compare_versions({0: 5, 1: 7})
        watch.compare_versions({0: 6, 1: 7, 2: 1})
        assert not logs
        watch.compare_versions({0: 2, 1: 3, 2: 1})
        watch.compare_versions({0: 3, 1: 3, 2: 2})
    (line,) = logs
    assert line["event"] == "values_rolled_back"
    assert line["reason"] == "shard 0 from 6 to 2, shard 1 from 7 to 3"
    assert line["num_updates_undone"] == 4
