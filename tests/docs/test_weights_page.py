"""The scripts of docs/weights.md, run in turn on one cluster."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest
from support.docs.pages import DOCS, blocks
from support.processes.commands import Shoal, finish, read_until, shoal_command

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

__all__ = ["shoal_command"]


@pytest.mark.long
def test_the_scripts_of_the_page_publish_and_read(shoal_command: Shoal, tmp_path: Path) -> None:
    """A trainer with two workers, a reader, and a publishing script that is not a member of a
    job."""
    scripts = [text for text in blocks(DOCS / "weights.md", "python") if "import torch" in text]
    train, read, publish = scripts
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        assert all('coordinator="127.0.0.1:7700"' in each for each in (read, publish))
        read, publish = (
            each.replace("127.0.0.1:7700", cluster.coordinator) for each in (read, publish)
        )
        for name, text in (("train", train), ("read", read), ("publish", publish)):
            (tmp_path / f"{name}.py").write_text(text)
        to_cluster = {"SHOAL_COORDINATOR": cluster.coordinator, "OMP_NUM_THREADS": "1"}
        reader = shoal_command.start_python("read.py", environment=to_cluster)
        run = shoal_command.start(
            "run", "-n", "2", "--job", "rl-job", "train.py", environment=to_cluster
        )
        code, output = finish(run)
        assert code == 0, output
        assert re.findall(r"published version (\d+) of step (\d+)", output) == [("4", "16")] * 2
        assert re.search(r"serving version [1-4]\b", "\n".join(read_until(reader, "serving")))
        script = shoal_command.start_python("publish.py")
        code, output = finish(script)
        assert code == 0, output
        assert "Version(1, step=17, digest=" in output


@pytest.mark.long
def test_the_toy_example_learns_while_a_worker_is_killed(
    shoal_command: Shoal, tmp_path: Path
) -> None:
    """Two rollouts continue after a worker of the trainer is killed, and get higher rewards from
    later versions. A rollout that starts after the trainer has ended gets its last version."""
    example = str(Path(__file__).parents[2] / "examples" / "rl_policy.py")
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        to_cluster = {
            "SHOAL_COORDINATOR": cluster.coordinator,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        }
        start = functools.partial(
            shoal_command.start_python, example, "rollout", environment=to_cluster
        )
        rollouts = [start(), start()]
        run = shoal_command.start(
            "run", "-n", "2", "--job", "rl", example, "train", environment=to_cluster
        )
        before = [read_until(rollout, "reward", 2) for rollout in rollouts]
        commands = shoal_command.processes().items()
        workers = [p for p, line in commands if line.endswith("py train") and " run " not in line]
        os.kill(max(workers), signal.SIGKILL)
        code, output = finish(run)
        assert code == 0, output
        late = start()
        last = read_until(late, "reward")[-1]
        newest = last.partition(":")[0]
        later = [read_until(rollout, f"{newest}:") for rollout in rollouts]
        for rollout in (*rollouts, late):
            rollout.kill()
        for first, final in zip(before, later, strict=True):
            assert reward(first[0]) < 0.5 and reward(final[-1]) > 0.8
        assert reward(last) > 0.8
        assert set(re.findall(r"published (version \d+) of step", output)) == {newest}


def reward(line: str) -> float:
    return float(line.rpartition(" ")[2])
