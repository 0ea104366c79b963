"""The scripts of docs/weights.md, one after the other on one cluster."""

import re
from pathlib import Path

import pytest
from e2e.conftest import Shoal, finish, read_until, shoal_command
from support.docs.pages import DOCS, blocks

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

__all__ = ["shoal_command"]


@pytest.mark.long
def test_the_scripts_of_the_page_publish_and_read(shoal_command: Shoal, tmp_path: Path) -> None:
    """A trainer with two workers, a reader beside it, and a script that is no member of a job."""
    scripts = [text for text in blocks(DOCS / "weights.md", "python") if "import torch" in text]
    train, read, publish = scripts
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        assert 'coordinator="127.0.0.1:7700"' in read
        read = read.replace("127.0.0.1:7700", cluster.coordinator)
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
        script = shoal_command.start_python("publish.py", environment=to_cluster)
        code, output = finish(script)
        assert code == 0, output
        assert "Version(1, step=17, digest=" in output


@pytest.mark.nightly
def test_the_toy_example_learns(shoal_command: Shoal, tmp_path: Path) -> None:
    """Rollouts of later versions earn more than those of the first."""
    example = str(Path(__file__).parents[2] / "examples" / "rl_policy.py")
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        to_cluster = {
            "SHOAL_COORDINATOR": cluster.coordinator,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
        }
        rollout = shoal_command.start_python(example, "rollout", environment=to_cluster)
        run = shoal_command.start(
            "run", "-n", "2", "--job", "rl", example, "train", environment=to_cluster
        )
        code, output = finish(run)
        assert code == 0, output
        lines = read_until(rollout, "reward", 2)
        rollout.kill()
        rewards = [float(line.rpartition(" ")[2]) for line in lines if "reward" in line]
        rest, _ = rollout.communicate()
        rewards += [
            float(line.rpartition(" ")[2]) for line in rest.splitlines() if "reward" in line
        ]
        assert rewards[-1] > 0.8 > rewards[0]
