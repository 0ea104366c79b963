"""Calls a server by a name whose address changes: moved_name.py HOSTS PORT.

Prints the seconds after which the second server, at the new address, has answered. HOSTS is this
process' /etc/hosts.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from shoal_client.connection.coordinators import CHANNEL_OPTIONS
from shoal_proto.tls.channels import direct_channel

NAME, METHOD = "moved.shoal", "/test.Names/Where"
GIVE_UP_S = 60.0


class Names(grpc.GenericRpcHandler):
    def __init__(self, answer: str) -> None:
        self._answer = answer.encode()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer)


def serve(host: str, port: str) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Names(host),))
    server.add_insecure_port(f"{host}:{port}")
    server.start()
    return server


def main(hosts: Path, port: str) -> None:
    first, second = "127.0.0.2", "127.0.0.3"
    hosts.write_text(f"{first} {NAME}\n")
    server = serve(first, port)
    with direct_channel(f"{NAME}:{port}", None, CHANNEL_OPTIONS) as channel:
        where = channel.unary_unary(METHOD)
        assert where(b"", timeout=10) == first.encode()
        hosts.write_text(f"{second} {NAME}\n")
        server.stop(0).wait()
        server, began_s = serve(second, port), time.monotonic()
        while time.monotonic() < began_s + GIVE_UP_S:
            try:
                assert where(b"", timeout=1) == second.encode()
            except grpc.RpcError:
                time.sleep(0.05)
            else:
                print(time.monotonic() - began_s)
                break
    server.stop(0).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
