"""A worker without the SDK: of Shoal it uses only the generated stubs and the protocol's version.

python examples/plain_grpc_worker.py COORDINATOR JOB

If the cluster uses TLS, which is the default of `shoal up`, SHOAL_TLS must name the folder with its
certificates. Any language with gRPC can do the same from the .proto files. The worker joins a job,
creates a parameter of two numbers, and fits a line to points, with the optimizer on the parameter
servers. If you start it several times with one job name, the processes train together.
"""

import json
import os
import random
import struct
import sys
import threading
import time
import uuid
import zlib
from pathlib import Path

import grpc

from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.v1 import membership_pb2 as membership
from shoal_proto.v1 import parameters_pb2 as parameters
from shoal_proto.v1 import shards_pb2 as shards
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub

LINE = (3.0, -2.0)
STEPS = 200
PATIENCE_S = 30.0
"""Time for which a push is repeated while a server is away or its shards move."""
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)])
SCHEMA = [shards.ParameterSpec(name="line", shape=[2], dtype="float32")]


def open_channel(address: str, name: str) -> grpc.Channel:
    """Open a channel. With TLS, the server's certificate must have `name`, which is a role's."""
    # Servers of the cluster are reached directly, not through http_proxy.
    direct = [("grpc.enable_http_proxy", 0)]
    if "SHOAL_TLS" not in os.environ:
        return grpc.insecure_channel(address, direct)
    folder = Path(os.environ["SHOAL_TLS"])
    files = (folder / file for file in ("ca.crt", "worker.key", "worker.crt"))
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    options = [*direct, ("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(address, credentials, options)


class Membership:
    """Membership of a job. It lasts as long as the stream of Attend is open and heartbeats are
    sent."""

    def __init__(self, channel: grpc.Channel, job: str) -> None:
        # Each process has a new incarnation, which distinguishes it from earlier processes of its
        # name. Servers remember pushes by incarnation.
        fresh = str(uuid.uuid4())
        self.token = Token(job=job, member_id=f"plain-{fresh[:8]}", incarnation=fresh)
        self._stub = MembershipStub(channel)
        self._left = threading.Event()
        request = membership.AttendRequest(
            protocol=OWN_PROTOCOLS.newest,
            token=self.token,
            spec=membership.JobSpec(job=job, min_members=1, max_members=8, desired_members=1),
            info=membership.MemberInfo(host="localhost", address="127.0.0.1"),
        )
        self._notices = self._stub.Attend(request)
        admitted = next(self._notices).admitted
        self._beats = threading.Thread(target=self._beat, args=(admitted.limits.heartbeat_s,))
        self._beats.start()

    def _beat(self, interval_s: float) -> None:
        request = membership.HeartbeatRequest(beats=[membership.Beat(token=self.token)])
        while not self._left.wait(interval_s):
            self._stub.Heartbeat(request)

    def leave(self) -> None:
        self._left.set()
        self._beats.join()
        self._stub.Leave(membership.LeaveRequest(token=self.token, reason="fitted"))
        self._notices.cancel()


class Line:
    """The job's parameter. It is small, so one shard on one server has all of it."""

    def __init__(self, coordinator: grpc.Channel, token: Token) -> None:
        self._token = token
        self._map = ShardsStub(coordinator)
        # The first call decides how parameters are cut and placed; all members get the same map.
        request = shards.PlaceRequest(token=token, parameters=SCHEMA)
        self._find(self._map.Place(request))
        self._sequence = 0
        self._version = 0
        self.values = (0.0, 0.0)

    def _find(self, shard_map: shards.ShardMap) -> None:
        (self._shard,) = shard_map.shards
        self._channel = open_channel(self._shard.address, "server.shoal")
        self._stub = ParametersStub(self._channel)

    def create(self) -> None:
        """Create the parameter with initial values, unless another worker has."""
        header = parameters.CreateHeader(token=self._token, optimizer=SGD, shards=[self._shard])
        piece = self._piece(struct.pack("<2f", 0.0, 0.0))
        requests = [parameters.CreateRequest(header=header), parameters.CreateRequest(piece=piece)]
        self._stub.Create(iter(requests))

    def pull(self) -> None:
        """Get the newest values."""
        item = parameters.PullItem(shard_id=self._shard.shard_id, epoch=self._shard.epoch)
        request = parameters.PullRequest(token=self._token, shards=[item], wait_s=10.0)
        for part in self._stub.Pull(request):
            self._take(part)

    def push(self, gradient: tuple[float, float]) -> None:
        """Apply a gradient exactly once, and get the resulting values.

        The sequence number makes a repetition safe: a push that was applied before is answered with
        its first outcome, even if another server holds the shard now.
        """
        self._sequence += 1
        give_up_s = time.monotonic() + PATIENCE_S
        while problem := self._push_once(gradient):
            if time.monotonic() > give_up_s:
                raise SystemExit(problem)
            time.sleep(0.1)
            self.close()
            self._find(self._map.GetMap(shards.GetMapRequest(token=self._token)))

    def _push_once(self, gradient: tuple[float, float]) -> str:
        """Push once. Returns the error; empty if there was none."""
        item = parameters.PushItem(
            shard_id=self._shard.shard_id, epoch=self._shard.epoch, base_version=self._version
        )
        header = parameters.PushHeader(
            token=self._token, sequence=self._sequence, shards=[item], return_values=True
        )
        piece = self._piece(struct.pack("<2f", *gradient))
        requests = [parameters.PushRequest(header=header), parameters.PushRequest(piece=piece)]
        try:
            for reply in self._stub.Push(iter(requests)):
                for outcome in reply.outcomes:
                    if outcome.HasField("error"):
                        return str(outcome.error.what)
                self._take(reply)
        except grpc.RpcError as error:
            return str(error)
        return ""

    def _piece(self, data: bytes) -> parameters.Piece:
        return parameters.Piece(shard_id=self._shard.shard_id, data=data, checksum=zlib.crc32(data))

    def _take(self, part: parameters.ShardData | parameters.PushReply) -> None:
        if part.HasField("version"):
            self._version = part.version.version
        if part.HasField("piece"):
            assert zlib.crc32(part.piece.data) == part.piece.checksum
            self.values = struct.unpack("<2f", part.piece.data)

    def close(self) -> None:
        self._channel.close()


def gradient_at(values: tuple[float, float]) -> tuple[float, float]:
    """Gradient of the mean squared error over sixteen random points of the line."""
    slope = offset = 0.0
    for _ in range(16):
        x = random.uniform(-1.0, 1.0)
        error = values[0] * x + values[1] - (LINE[0] * x + LINE[1])
        slope += 2 * error * x / 16
        offset += 2 * error / 16
    return slope, offset


def main() -> None:
    address, job = sys.argv[1:]
    with open_channel(address, "coordinator.shoal") as coordinator:
        member = Membership(coordinator, job)
        line = Line(coordinator, member.token)
        line.create()
        line.pull()
        for _ in range(STEPS):
            line.push(gradient_at(line.values))
        print(json.dumps({"member": member.token.member_id, "line": line.values}))
        line.close()
        member.leave()


if __name__ == "__main__":
    main()
