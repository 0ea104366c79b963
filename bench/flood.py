"""Recovery of a DDP job from the loss of a worker while other clients flood the coordinator.

    make bench NAME=flood
    .venv/bin/python bench/flood.py 10 --silent 2000     # kills; a smaller flood

Real processes on one machine at default settings: etcd, a coordinator, `shoal run` with four DDP
workers. The flood comes from one more process: 20,000 connections that send nothing, half of them
to the gRPC port and half to HTTP, opened again when they are closed; 1,000 clients of the live page
that do not read; at most 50 calls a second, each with a wait of NaN seconds; 10,000 members that
attend another job and propose nothing. `flood_recovery`: time from the SIGKILL of a worker until
all remaining workers have committed a step together, in the flood. `flood_recovery_quiet`: the same
without a flood, in the same run. `flood_KIND_most`: most connections or members open at one time.
"""

import argparse
import asyncio
import json
import math
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc
import grpc.aio
from recovery import strikes
from rows import Row, publish
from training.jobs import NUM_WORKERS, ShoalJob

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.incarnation import new_incarnation
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.rendezvous_pb2 import StoreGetRequest
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub

NUM_KILLS = 8
NUM_SILENT, NUM_READERS, NUM_ATTENDING = 20_000, 1_000, 10_000
NAN_CALLS_PER_S = 50
MEMBERS_A_CHANNEL = 500
OPEN_WITHIN_S = 180.0
AGAIN_S = 1.0
"""Pause before a closed connection of the flood is opened again."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    silent: int
    readers: int
    attending: int


class Strangers:
    """The flood's clients in one process, with counts of open connections."""

    def __init__(self, address: str, page: str, sizes: Sizes) -> None:
        self._address = address
        self._page = page
        self._sizes = sizes
        self.open = {"silent": 0, "readers": 0, "attending": 0}
        self.most = dict(self.open)
        self.num_nan = 0
        self._attending: dict[grpc.aio.Channel, dict[str, Token]] = {}

    async def run(self) -> None:
        silent = [
            self._silent(self._address if n % 2 else self._page) for n in range(self._sizes.silent)
        ]
        readers = [self._reader() for _ in range(self._sizes.readers)]
        channels = [
            grpc.aio.insecure_channel(
                self._address, options=(("grpc.use_local_subchannel_pool", 1),)
            )
            for _ in range(-(-self._sizes.attending // MEMBERS_A_CHANNEL))
        ]
        attending = [
            self._attend(channels[n // MEMBERS_A_CHANNEL], n) for n in range(self._sizes.attending)
        ]
        beating = [self._beat(channel) for channel in channels]
        await asyncio.gather(self._tell(), self._ask_nan(), *beating, *attending, *readers, *silent)

    def _count(self, kind: str, by: int) -> None:
        self.open[kind] += by
        self.most[kind] = max(self.most[kind], self.open[kind])

    async def _silent(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            self._count("silent", 1)
            try:
                # Read what the server sends, to notice the end of the connection; send nothing.
                while await reader.read(4096):
                    pass
            except OSError:
                pass
            finally:
                self._count("silent", -1)
                writer.close()
            await asyncio.sleep(AGAIN_S)

    async def _reader(self) -> None:
        host, _, port = self._page.rpartition(":")
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            except OSError:
                await asyncio.sleep(AGAIN_S)
                continue
            writer.write(f"GET /api/v1/stream HTTP/1.1\r\nhost: {self._page}\r\n\r\n".encode())
            self._count("readers", 1)
            try:
                head = await reader.read(1)
                writer.transport.pause_reading()
                while head and not writer.transport.is_closing():  # noqa: ASYNC110
                    await asyncio.sleep(AGAIN_S)
            except OSError:
                pass
            finally:
                self._count("readers", -1)
                writer.close()
            await asyncio.sleep(AGAIN_S)

    async def _attend(self, channel: grpc.aio.Channel, number: int) -> None:
        request = pb.AttendRequest(
            protocol=OWN_PROTOCOLS.newest,
            oldest_protocol=OWN_PROTOCOLS.oldest,
            token=Token(job="strangers", member_id=f"s{number}", incarnation=new_incarnation()),
            spec=pb.JobSpec(
                job="strangers", min_members=20_000, max_members=40_000, desired_members=20_000
            ),
            info=pb.MemberInfo(host=f"h{number % 100}", pid=number + 1, address="127.0.0.1"),
        )
        while True:
            stream = MembershipStub(channel).Attend(request)
            try:
                if await stream.read() is not grpc.aio.EOF:
                    self._count("attending", 1)
                    self._attending.setdefault(channel, {})[request.token.member_id] = request.token
                    try:
                        while await stream.read() is not grpc.aio.EOF:
                            pass
                    finally:
                        self._count("attending", -1)
                        self._attending[channel].pop(request.token.member_id, None)
            except grpc.aio.AioRpcError:
                pass
            request.token.incarnation = new_incarnation()
            await asyncio.sleep(AGAIN_S)

    async def _beat(self, channel: grpc.aio.Channel) -> None:
        """Send heartbeats, so that the members are not lost."""
        while True:
            tokens = list(self._attending.get(channel, {}).values())
            beats = [pb.Beat(token=token) for token in tokens]
            try:
                await MembershipStub(channel).Heartbeat(
                    pb.HeartbeatRequest(beats=beats), timeout=5.0
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.INTERNAL:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _ask_nan(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = RendezvousStub(channel)
            while True:
                try:
                    await stub.Get(StoreGetRequest(timeout_s=math.nan), timeout=5.0)
                except grpc.aio.AioRpcError:
                    self.num_nan += 1
                await asyncio.sleep(1 / NAN_CALLS_PER_S)

    async def _tell(self) -> None:
        while True:
            counts = {**self.open, "most": self.most, "nan_calls": self.num_nan}
            print(json.dumps(counts), flush=True)
            await asyncio.sleep(1.0)


def as_strangers(address: str, page: str, sizes: Sizes) -> None:
    """Run the flood in this process, until it is killed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    spare = max(1, hard - sizes.readers - 200)
    silent = min(sizes.silent, spare)
    if silent < sizes.silent:
        print(json.dumps({"note": f"{silent} silent connections: {hard} descriptors"}), flush=True)
    asyncio.run(
        Strangers(
            address, page, Sizes(silent=silent, readers=sizes.readers, attending=sizes.attending)
        ).run()
    )


@contextmanager
def flood(address: str, page: str, sizes: Sizes) -> Iterator[Path]:
    """Run the flood within the block; yields the file of its counts, one JSON line a second."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as output:
        arguments = [
            "--silent",
            sizes.silent,
            "--readers",
            sizes.readers,
            "--attending",
            sizes.attending,
        ]
        process = subprocess.Popen(
            [sys.executable, __file__, "--flood", address, page, *map(str, arguments)],
            stdout=output,
        )
        try:
            path = Path(output.name)
            await_members(path, process, sizes)
            yield path
        finally:
            process.kill()
            process.wait()


def await_members(path: Path, process: "subprocess.Popen[bytes]", sizes: Sizes) -> None:
    """Wait until nearly all members attend, which takes longest, or until the time limit."""
    deadline_s = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemExit("the flood's process has ended")
        if newest(path).get("attending", 0) >= 0.95 * sizes.attending:
            return
        time.sleep(0.5)
    print(f"not all members attend after {OPEN_WITHIN_S:g} s: {newest(path)}")


def newest(path: Path) -> dict[str, int]:
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    found: dict[str, int] = json.loads(lines[-1]) if lines else {}
    return found


def measure(
    directory: Path, num_kills: int, sizes: Sizes
) -> tuple[list[float], list[float], dict[str, int]]:
    config = LocalClusterConfig(directory=directory / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        place = directory / "ddp"
        with ShoalJob(cluster, place, max_members=NUM_WORKERS) as job:
            quiet = strikes(job.steps, place, signal.SIGKILL, num_kills)
            page = cluster.http_url.removeprefix("http://")
            with flood(cluster.coordinator, page, sizes) as output:
                print(f"the flood: {newest(output)}", flush=True)
                flooded = strikes(job.steps, place, signal.SIGKILL, num_kills)
                last = newest(output)
        print(f"the flood, at its end: {last}")
    return quiet, flooded, last


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", nargs="?", type=int, default=NUM_KILLS)
    parser.add_argument("--silent", type=int, default=NUM_SILENT)
    parser.add_argument("--readers", type=int, default=NUM_READERS)
    parser.add_argument("--attending", type=int, default=NUM_ATTENDING)
    parser.add_argument("--flood", nargs=2, metavar=("ADDRESS", "PAGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(silent=arguments.silent, readers=arguments.readers, attending=arguments.attending)
    if arguments.flood:
        as_strangers(*arguments.flood, sizes)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-flood-") as folder:
        quiet, flooded, last = measure(Path(folder), arguments.kills, sizes)
    most = last.get("most")
    opened = dict(most) if isinstance(most, dict) else {}
    rows = [
        Row(metric="flood_recovery", value=median(flooded), unit="s", runs=len(flooded)),
        Row(metric="flood_recovery_max", value=max(flooded), unit="s", runs=len(flooded)),
        Row(metric="flood_recovery_quiet", value=median(quiet), unit="s", runs=len(quiet)),
        Row(
            metric="flood_recovery_ratio",
            value=median(flooded) / median(quiet),
            unit="x",
            runs=len(flooded),
        ),
    ]
    rows += [
        Row(metric=f"flood_{kind}_most", value=count, unit="open", runs=1)
        for kind, count in sorted(opened.items())
    ]
    publish("flood", rows)


if __name__ == "__main__":
    main()
