"""Handlers of torchrun's rendezvous, with a real coordinator."""

from collections.abc import Iterator

import pytest
from support.torchrun.handlers import Join, parameters
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shoal.torchrun import create_handler
from shoal_client.local.cluster import LocalCluster


@pytest.fixture
def join(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Join]:
    """Function that makes handlers of one job, named after the test. Handlers still open leave at
    its end."""
    handlers: list[RendezvousHandler] = []
    job = "".join(c if c.isalnum() else "-" for c in request.node.name.removeprefix("test_"))

    def one(
        nodes: tuple[int, int] = (1, 2), endpoint: str = cluster.coordinator, **conf: str
    ) -> RendezvousHandler:
        conf = {"last_call_timeout": "20"} | conf
        handlers.append(create_handler(parameters(endpoint, job, nodes, **conf)))
        return handlers[-1]

    yield one
    for handler in handlers:
        handler.shutdown()
