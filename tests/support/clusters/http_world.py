"""A coordinator served over gRPC and HTTP, for commands that ask it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from support.clusters.coordinator_world import Served, served
from support.clusters.memory_store import MemoryStore

from shoal_client.cli import parse
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

OVER_HTTP = ("jobs", "status", "why", "top")
"""Commands that only read the status page."""


@dataclass(frozen=True, kw_only=True)
class ServedOverHttp:
    members: Served
    url: str

    async def shoal(self, command: str, *arguments: str) -> int:
        """Run the command in a thread, so that the coordinator runs meanwhile."""
        addresses = ["--coordinator", self.members.address]
        if command in OVER_HTTP:
            addresses = ["--http", self.url.removeprefix("http://")]
        elif command == "drain":
            addresses += ["--http", self.url]
        return await asyncio.to_thread(parse([command, *addresses, *arguments]))


@asynccontextmanager
async def served_over_http() -> AsyncIterator[ServedOverHttp]:
    async with served(MemoryStore()) as members:
        view, board = members.coordinator.view, members.coordinator.board
        async with StatusServer(build_app(view, board), "127.0.0.1", 0) as http:
            yield ServedOverHttp(members=members, url=http.url)
