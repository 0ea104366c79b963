"""A worker without Shoal's packages: only gRPC and Shoal's .proto files."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.network import http

from shoal_client.local.access import LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_grpc_worker.py"
DEADLINE_S = 100.0
NUM_WORKERS, STEPS = 2, 200


def test_the_example_uses_generated_modules_only() -> None:
    """Messages, stubs and the protocol's number are the example's only imports from Shoal."""
    tree = ast.parse(EXAMPLE.read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.startswith("shoal")}
    others = ours - {"shoal_proto.protocol", "shoal_proto.v1"}
    assert all(module.endswith(("_pb2", "_pb2_grpc")) for module in others)
    assert any(module.endswith("_grpc") for module in ours)


@pytest.mark.long
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.long)])
def test_plain_grpc_clients_train_together(tmp_path: Path, tls: bool) -> None:
    """Two clients fit one line, and each push of each client is counted once; with TLS, too."""
    config = LocalClusterConfig(
        directory=tmp_path / "cluster", num_parameter_servers=1, tls=LocalTls() if tls else None
    )
    shown = {"SHOAL_TLS": str(tmp_path / "cluster" / "certs")} if tls else {}
    with LocalCluster(config) as cluster:
        workers = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), cluster.coordinator, "line"],
                stdout=subprocess.PIPE,
                env={**os.environ, **shown},
                text=True,
            )
            for _ in range(NUM_WORKERS)
        ]
        try:
            outputs = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0] * NUM_WORKERS
        fitted = [json.loads(output) for output in outputs]
        shards = http.get(f"{cluster.http_url}/api/v1/jobs/line/shards").json()
    assert len({each["member"] for each in fitted}) == NUM_WORKERS
    for each in fitted:
        assert each["line"] == pytest.approx([3.0, -2.0], abs=0.05)
    (shard,) = shards["shards"]
    assert shard["pushes"]["applied"] == NUM_WORKERS * STEPS
