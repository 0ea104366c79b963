"""The standard gRPC health service (grpc.health.v1), for probes and other coordinators.

The name "" stands for the process, and `leader` for its leadership.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from shoal_server.serving.rpc import Context

PROCESS = ""
LEADER = "leader"

_SERVING, _NOT_SERVING, _UNKNOWN = (
    pb.HealthCheckResponse.SERVING,
    pb.HealthCheckResponse.NOT_SERVING,
    pb.HealthCheckResponse.SERVICE_UNKNOWN,
)


class HealthService(HealthServicer):  # type: ignore[misc]  # grpcio-health-checking has no types
    def __init__(self) -> None:
        self._leads = self._ended = False
        self._changed = asyncio.Event()

    def set_leads(self, leads: bool) -> None:
        """Set the leadership, and notify watchers."""
        self._leads = leads
        self._notify()

    def end(self) -> None:
        """End every watch: the server stops."""
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status == _UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no service {request.service!r}; expected {PROCESS!r} or {LEADER!r}",
            )
        return pb.HealthCheckResponse(status=status)

    async def Watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        sent: int | None = None
        while not self._ended:
            changed, status = self._changed, self._status(request.service)
            if status != sent:
                yield pb.HealthCheckResponse(status=status)
                sent = status
                continue  # the status may have changed while the caller read
            await changed.wait()

    def _status(self, service: str) -> int:
        if service == PROCESS:
            return int(_SERVING)
        if service == LEADER:
            return int(_SERVING if self._leads else _NOT_SERVING)
        return int(_UNKNOWN)
