"""The watch of a session finds a device that is stuck in a collective, wherever the trainer
waits."""

import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from support.processes.load import unhurried

from shoal.strategies.synchronous.hang_watch import HangWatch, HangWatchConfig, TrainerStage
from shoal_client.liveness.trainer_status import TrainerStatus

LIMIT_S = 0.4


class Watched:
    """A trainer in the script's own code, whose device is stuck from the beginning."""

    def __init__(self, held_until_s: Callable[[], float]) -> None:
        self.hung, self.looked = threading.Event(), threading.Semaphore(0)
        self.doing: list[TrainerStatus] = []
        self._began_s = time.monotonic()
        self.watch = HangWatch(
            HangWatchConfig(
                limit_s=LIMIT_S,
                leaderless_s=60.0,
                is_away=lambda: False,
                num_moved=lambda: 0,
                held_until_s=held_until_s,
                report_status=self._does,
                hung=lambda generation: self.hung.set(),
                device_stalled_since_s=lambda now_s: self._began_s,
            )
        )
        group: dist.ProcessGroup = dist.ProcessGroup(0, 2)
        self.watch.stage(TrainerStage.TRAINING, 3, group)
        self.watch.start()

    def _does(self, doing: TrainerStatus) -> None:
        self.doing.append(doing)
        self.looked.release()


def test_a_device_that_is_stalled_for_too_long_counts_as_hung() -> None:
    watched = Watched(lambda: 0.0)
    assert watched.hung.wait(unhurried(10.0))
    watched.watch.close()
    assert "did not finish" in watched.watch.hang_report(3)
    # The member waits for others: it is not the one that delays them.
    assert all(each.waits for each in watched.doing)


def test_no_limit_runs_in_a_pause() -> None:
    watched = Watched(time.monotonic)
    for _ in range(40):  # twice the limit
        assert watched.looked.acquire(timeout=unhurried(10.0))
    watched.watch.close()
    assert not watched.hung.is_set()
