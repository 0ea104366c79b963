"""`session.pause`: work that one member does alone while the others wait. Other absences are hangs.

Members and coordinator are real; limits are shorter than usual.
"""

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.network import http
from support.processes.ranks import Rank, Ranks
from support.processes.served_process import awaited
from support.training import pause_bodies
from support.training.pause_bodies import LIMITS, Pausing

from shoal_client.connection.coordinators import Coordinators
from shoal_client.local.cluster import LocalCluster
from shoal_client.membership import calls as membership_calls
from shoal_proto.v1.membership_pb2 import DrainRequest

COLLECTIVE_S = LIMITS["--collective-s"]
JOIN_S = LIMITS["--join-s"]
WAIT_S = 60.0


class Play:
    """A job of members "a", "b" ...; "a" is away at step 3 until `come_back`."""

    def __init__(self, cluster: LocalCluster, ranks: Ranks, job: str, path: Path, **run: Any):
        self._cluster, self._ranks, self._path = cluster, ranks, path
        self.run = Pausing(
            coordinator=cluster.coordinator,
            job=job,
            member_id="",
            at_step=3,
            gate=str(path / "gate"),
            stop_file=str(path / "stop"),
            **run,
        )

    def start(self, name: str, **changes: Any) -> Rank:
        run = replace(self.run, member_id=name, **changes)
        return self._ranks.start(pause_bodies.refused, run)

    def begin(self, names: str, **of_a: Any) -> list[Rank]:
        """Start members with these names; return them once "a" is away."""
        crew = [self.start("a", is_away=True, **of_a), *map(self.start, names[1:])]
        crew[0].expect("away")
        return crew

    def await_waiter(self, name: str) -> str:
        """Wait until the member waits for one that is paused; return the reason."""
        return awaited(
            lambda: why if "is paused" in (why := self.why(name)) else None, WAIT_S, f"{name} waits"
        )

    def come_back(self) -> None:
        (self._path / "gate").touch()

    def stop(self, at_step: int) -> None:
        """The file appears at once, since a member may read it at any time."""
        (self._path / "new").write_text(str(at_step))
        (self._path / "new").rename(self._path / "stop")

    def why(self, name: str) -> str:
        """Return what the member waits for, as `shoal why` says."""
        url = f"{self._cluster.http_url}/api/v1/jobs/{self.run.job}/members/{name}/why"
        answer = http.get(url)
        return str(answer.json()["waiting_for"]) if answer.status_code == httpx.codes.OK else ""

    def events(self) -> str:
        url = f"{self._cluster.http_url}/api/v1/jobs/{self.run.job}/events"
        return http.get(url).text


def drain(cluster: LocalCluster, play: Play, name: str) -> None:
    """Drain a member as `shoal drain` does."""
    coordinators = Coordinators([cluster.coordinator])
    request = DrainRequest(job=play.run.job, member_id=name, reason="spot notice")
    coordinators.call(membership_calls.METHODS[DrainRequest], request, timeout_s=WAIT_S)
    coordinators.close()


def in_generation(rank: Rank, number: int) -> dict[str, Any]:
    """Return the member's first committed step in generation `number` or a later one."""
    while (step := rank.expect("committed"))["generation"] < number:
        pass
    return step


def generations(rank: Rank) -> set[int]:
    return {data["generation"] for kind, data in rank.seen if kind == "committed"}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_others_wait_for_a_paused_member_and_none_is_expelled(
    quick: LocalCluster, tmp_path: Path, strategy: str
) -> None:
    """The pause takes twice as long as a collective may take, and longer than the detection of a
    hang. The generation is the same before and after it."""
    with Ranks() as ranks:
        play = Play(
            quick, ranks, f"wait-{strategy}", tmp_path, desired_members=3, strategy=strategy
        )
        crew = play.begin("abc")
        until_s = time.monotonic() + 2.0 * COLLECTIVE_S
        reason = play.await_waiter("b")
        while time.monotonic() < until_s:
            reason = play.why("b")
            assert "(a) is paused: validation, for " in reason
            time.sleep(0.05)  # the answer must be the same throughout; fewer calls are enough
        assert reason.endswith(" s of 600 s")
        assert "its own pause: validation" in play.why("a")
        play.come_back()
        crew[0].expect("back")
        play.stop(30)
        assert [rank.expect("finished")["step"] for rank in crew] == [30] * 3
        assert [generations(rank) for rank in crew] == [{1}] * 3


@pytest.mark.long
def test_a_member_that_is_away_without_a_pause_is_expelled_with_the_remedy(
    quick: LocalCluster, tmp_path: Path
) -> None:
    """The error has the member's time and the remedy; the others continue without it."""
    with Ranks() as ranks:
        play = Play(quick, ranks, "away", tmp_path, desired_members=3)
        crew = play.begin("abc", pauses=False)
        assert in_generation(crew[1], 2)["world_size"] == 2
        play.come_back()
        text = crew[0].expect("refused")["text"]
        assert "(a) has been in your code for " in text
        assert 'session.pause("validation")' in text
        assert ".cc:" not in text
        assert "(a) has been in your code for " in play.events()
        play.stop(10_000)


@pytest.mark.long
def test_a_pause_that_outlasts_its_own_limit_is_a_hang(quick: LocalCluster, tmp_path: Path) -> None:
    """The others continue without it at that moment; its error names the limit."""
    with Ranks() as ranks:
        play = Play(quick, ranks, "over", tmp_path, desired_members=2)
        crew = play.begin("ab", limit_s=2.0)
        assert in_generation(crew[1], 2)["world_size"] == 1
        play.come_back()
        text = crew[0].expect("refused")["text"]
        assert "(a) is paused: validation, for 2 s of 2 s" in text
        assert "limit_s" in text


@pytest.mark.long
def test_a_killed_waiter_is_noticed_during_the_pause_and_the_rest_go_on_after_it(
    quick: LocalCluster, tmp_path: Path
) -> None:
    """Holds however long the pause goes on after the kill."""
    with Ranks() as ranks:
        play = Play(quick, ranks, "waiter", tmp_path, desired_members=3)
        crew = play.begin("abc")
        play.await_waiter("b")
        crew[2].send_signal(signal.SIGKILL)
        awaited(lambda: "member_removed" in play.events() or None, 5.0, "c is missed")
        until_s = time.monotonic() + 2.0 * COLLECTIVE_S
        while time.monotonic() < until_s:
            assert "(a) is paused" in play.why("b")
        play.come_back()
        assert in_generation(crew[1], 2)["world_size"] == 2
        assert in_generation(crew[0], 2)["world_size"] == 2


def test_the_others_stop_waiting_for_a_paused_member_that_is_killed(
    quick: LocalCluster, tmp_path: Path
) -> None:
    with Ranks() as ranks:
        play = Play(quick, ranks, "pausing", tmp_path, desired_members=3)
        crew = play.begin("abc")
        play.await_waiter("b")
        crew[0].send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        assert in_generation(crew[1], 2)["world_size"] == 2
        assert time.monotonic() - killed_s < 2 * COLLECTIVE_S
        assert "is paused" not in play.why("b")


@pytest.mark.long
def test_members_that_join_or_drain_during_a_pause_wait_for_its_end(
    quick: LocalCluster, tmp_path: Path
) -> None:
    """The joiner's reason names the pause. After it, one change admits the joiner and drains the
    other, and no step is repeated."""
    with Ranks() as ranks:
        play = Play(quick, ranks, "join", tmp_path, desired_members=3)
        crew = play.begin("abc")
        crew.append(play.start("d"))
        drain(quick, play, "c")
        until_s = time.monotonic() + 1.5 * COLLECTIVE_S
        play.await_waiter("d")
        while time.monotonic() < until_s:
            assert "(a) is paused: validation" in play.why("d")
            time.sleep(0.1)
        play.come_back()
        assert crew[3].expect("committed")["world_size"] == 3
        assert crew[2].join() == 128 + signal.SIGTERM
        crew[0].expect("committed")
        crew[0].catch_up()
        steps = [data["step"] for kind, data in crew[0].seen if kind == "committed"]
        assert steps == list(range(len(steps)))


@pytest.mark.long
def test_a_pause_before_the_first_batch_is_waited_for(quick: LocalCluster, tmp_path: Path) -> None:
    """The last call waits, too: after it a first generation would form without the missing
    member."""
    with Ranks() as ranks:
        play = Play(quick, ranks, "early", tmp_path, desired_members=2)
        crew = play.begin("ab", early=True)
        play.await_waiter("b")
        until_s = time.monotonic() + JOIN_S / 4 + 1.0
        while time.monotonic() < until_s:
            assert "a is paused: validation" in play.why("b")
        play.come_back()
        assert [rank.expect("committed")["world_size"] for rank in crew] == [2, 2]
