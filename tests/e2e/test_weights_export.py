"""`shoal weights export` writes what a script has published."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.processes.commands import Shoal, finish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

PUBLISH = """
import torch, shoal
for number in (1.0, 2.0):
    state = {"w": torch.full((3, 4), number)}
    print(shoal.publish("ranking/model", state).wait("committed", timeout=60))
"""


@pytest.mark.long
def test_a_version_is_exported_by_its_number(shoal_command: Shoal, tmp_path: Path) -> None:
    """Versions are in SGLang's layout; an export without `--into` is refused."""
    (tmp_path / "publish.py").write_text(PUBLISH)
    with LocalCluster(LocalClusterConfig(directory=tmp_path / "cluster")) as cluster:
        to_cluster = {"SHOAL_COORDINATOR": cluster.coordinator}
        code, output = finish(shoal_command.start_python("publish.py", environment=to_cluster))
        assert code == 0, output
        arguments = ("weights", "export", "ranking/model", "--coordinator", cluster.coordinator)
        code, output = finish(shoal_command.start(*arguments))
        assert code == 2 and "--into" in output, output
        into = ("--into", str(tmp_path / "exported"), "--format", "sglang")
        for number in ("1", "2"):
            code, output = finish(
                shoal_command.start(*arguments[:3], number, *arguments[3:], *into)
            )
            assert code == 0, output
    for number in (1, 2):
        [file] = (tmp_path / "exported" / f"weight_v{number:06d}").glob("*.safetensors")
        assert torch.equal(load_file(file)["w"], torch.full((3, 4), float(number)))
