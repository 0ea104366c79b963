"""Calls of gRPC to a coordinator and to a parameter server, with unexpected messages."""

import asyncio
import importlib
import pkgutil
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from fuzzing.findings import Findings, Input
from fuzzing.messages import MessageMaker
from google.protobuf.descriptor import Descriptor

import shoal_proto.v1

ANSWER_S = 0.4
"""Deadline of a call: the fuzzer does not wait for longer answers."""
OF_SERVERS = {"Parameters", "Replication", "ShardSnapshots"}
"""Services of a parameter server; a coordinator has the others."""
UNHANDLED = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
LOST = "Internal error from Core"
"""Details that grpc.aio gives if the server has ended a stream that is still written to: it loses
the server's status. The input is then sent again by gRPC's synchronous API, which keeps the
status."""
AT_ONCE = 16


@dataclass(frozen=True)
class Call:
    path: str
    request: Descriptor
    is_stream: bool
    """True if the requests are a stream."""
    of_server: bool


def all_calls() -> Sequence[Call]:
    found = []
    for module in pkgutil.iter_modules(shoal_proto.v1.__path__):
        if not module.name.endswith("_pb2"):
            continue
        file = importlib.import_module(f"shoal_proto.v1.{module.name}").DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                stream = bool(method.client_streaming)
                of_server = service.name in OF_SERVERS
                found.append(Call(path, method.input_type, stream, of_server))
    return found


class CallFuzzer:
    """Sends calls to the coordinator at one address and the parameter server at another."""

    def __init__(
        self, maker: MessageMaker, draw: random.Random, coordinator: str, server: str
    ) -> None:
        self._maker = maker
        self._draw = draw
        self._calls = all_calls()
        options = (("grpc.enable_retries", 0), ("grpc.max_reconnect_backoff_ms", 200))
        addresses = {False: coordinator, True: server}
        self._channels = {
            of_server: grpc.aio.insecure_channel(address, options=options)
            for of_server, address in addresses.items()
        }
        self._blocking = {
            of_server: grpc.insecure_channel(address, options=options)
            for of_server, address in addresses.items()
        }

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for blocking in self._blocking.values():
            blocking.close()

    def draw_input(self) -> Input:
        call = self._draw.choice(self._calls)
        count = self._draw.choice((1, 1, 2, 3, 6)) if call.is_stream else 1
        parts = []
        for _ in range(count):
            data = self._maker.make(call.request).SerializeToString()
            parts.append(self._maker.spoilt(data) if self._draw.random() < 0.2 else data)
        return Input(surface="grpc", to=call.path, parts=parts)

    async def run(self, num: int, findings: Findings) -> None:
        """Send so many inputs, some of them at the same time."""
        # Inputs are drawn before any is sent: the order of answers must not change the draw.
        left = iter([self.draw_input() for _ in range(num)])

        async def worker() -> None:
            for sent in left:
                await self.send(sent, findings)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))

    async def send(self, sent: Input, findings: Findings) -> None:
        call = next(each for each in self._calls if each.path == sent.to)
        channel = self._channels[call.of_server]

        async def requests() -> AsyncIterator[bytes]:
            for part in sent.parts:
                yield part

        stream: Any = channel.stream_stream(sent.to)(requests(), timeout=ANSWER_S)
        outcome = "OK"
        try:
            for _ in range(8):
                if await stream.read() is grpc.aio.EOF:
                    break
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
            if details == LOST:
                code, details = await asyncio.to_thread(self._status, call, sent)
            outcome = code.name
            if code in UNHANDLED:
                findings.found(sent, f"{sent.to}: {code.name}: {details}")
        finally:
            stream.cancel()
        findings.note(sent, outcome)

    def _status(self, call: Call, sent: Input) -> tuple[grpc.StatusCode, str]:
        """The status with which the server ends the call."""
        answers = self._blocking[call.of_server].stream_stream(sent.to)(
            iter(sent.parts), timeout=ANSWER_S
        )
        try:
            for _ in zip(range(8), answers, strict=False):
                pass
        except grpc.RpcError as error:
            return error.code(), str(error.details())
        finally:
            answers.cancel()
        return grpc.StatusCode.OK, ""
