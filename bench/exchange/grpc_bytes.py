"""gRPC with a tensor's bytes in one field of a protobuf message, one message for each tensor."""

from multiprocessing.connection import Connection

from exchange import grpc_protobuf
from exchange.model import Exchange


def serve(owner: Connection, num_workers: int) -> None:
    grpc_protobuf.serve(owner, num_workers, as_bytes=True)


def connect(address: str, number: int, num_workers: int) -> Exchange:
    return grpc_protobuf.connect(address, number, num_workers, as_bytes=True)
