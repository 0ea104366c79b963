"""Renewal of a lease on a thread of its own."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
from support.processes.served_process import awaited

from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.etcd import etcd_pb2_grpc as stubs
from shoal_server.etcd.api import LeaseId
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

LIMIT_S = 10.0


class SilentOnce(stubs.LeaseServicer):
    """Lease service that ends its first renewal without an answer."""

    def __init__(self) -> None:
        self.num_calls = 0

    def LeaseKeepAlive(
        self, request_iterator: Iterator[pb.LeaseKeepAliveRequest], context: object
    ) -> Iterator[pb.LeaseKeepAliveResponse]:
        self.num_calls += 1
        if self.num_calls > 1:
            for request in request_iterator:
                yield pb.LeaseKeepAliveResponse(ID=request.ID, TTL=2)


async def test_a_lease_is_renewed_after_a_call_without_an_answer() -> None:
    """The missing answer does not say that the lease is gone."""
    server, service = grpc.server(ThreadPoolExecutor(2)), SilentOnce()
    stubs.add_LeaseServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = EtcdClient(EtcdConfig(endpoints=(f"127.0.0.1:{port}",)))
    renewal = client.renew_in_background(LeaseId(1), 0.2)
    try:
        look = partial(awaited, lambda: renewal.confirmed, LIMIT_S, "the lease is renewed")
        await asyncio.to_thread(look)
        assert service.num_calls > 1
    finally:
        renewal.end()
        await client.close()
        server.stop(None).wait()
