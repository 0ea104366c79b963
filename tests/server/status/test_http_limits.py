"""Limits of the status server: slow or silent clients, numbers of connections and live pages,
allowed hosts, invalid HTTP."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_server.serving.admission.config import HttpLimits
from shoal_server.status.app import build_app
from shoal_server.status.http.bounds import HttpBounds
from shoal_server.status.http.hosts import AllowedHosts
from shoal_server.status.serve import StatusServer

SOON_S = 30.0
"""Time limit of a test, far more than a test takes."""
QUICK = HttpLimits(http_request_s=0.2, http_stalled_s=0.2)
HEALTH = "/api/v1/jobs/digits/members/w1/health"


@asynccontextmanager
async def serving(
    world: World, limits: HttpLimits, *hosts: str
) -> AsyncIterator[tuple[StatusServer, HttpBounds]]:
    bounds = HttpBounds(limits)
    app = build_app(world, world.board, bounds=bounds, hosts=AllowedHosts(hosts))
    async with asyncio.timeout(SOON_S), StatusServer(app, "127.0.0.1", 0) as server:
        yield server, bounds


async def connect(server: StatusServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port)


def kind_of(answer: bytes) -> tuple[int, str]:
    """Return status and kind of error of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["kind"]


@pytest.mark.long
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nx: y"]
)
async def test_an_unfinished_request_is_refused(world: World, sent: bytes) -> None:
    async with serving(world, QUICK) as (server, bounds):
        reader, writer = await connect(server)
        writer.write(sent)
        assert kind_of(await reader.read()) == (408, "DeadlineExceeded")
        assert bounds.connections.refused["late requests"] == 1
        writer.close()


@pytest.mark.long
async def test_a_further_request_of_a_connection_has_the_same_limit(world: World) -> None:
    async with serving(world, QUICK) as (server, _):
        reader, writer = await connect(server)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert await reader.readuntil(b"ok\n")
        writer.write(b"GET ")
        assert kind_of(await reader.read()) == (408, "DeadlineExceeded")
        writer.close()


@pytest.mark.long
@pytest.mark.parametrize("rest", [b"x", b"x" * 39], ids=["incomplete", "complete"])
async def test_a_body_that_arrives_after_its_answer_gets_no_second_one(
    world: World, rest: bytes
) -> None:
    """The client would take a second answer for that to its next request."""
    async with serving(world, QUICK) as (server, _):
        reader, writer = await connect(server)
        head = b"POST /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 40\r\n\r\n"
        writer.write(head + b"{")
        answer = await reader.readuntil(b"}")
        assert kind_of(answer) == (404, "RefusedError")
        writer.write(rest)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.long
async def test_an_unfinished_body_is_refused(world: World) -> None:
    async with serving(world, QUICK) as (server, _):
        reader, writer = await connect(server)
        head = f"POST {HEALTH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: 40\r\n\r\n{")
        head_bytes = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head_bytes
        writer.close()


@pytest.mark.long
async def test_a_connection_beyond_the_limit_is_refused_as_overloaded(world: World) -> None:
    """Connections are limited in total and for each peer. Once a connection is closed, another is
    accepted."""
    for limits, reason in (
        (HttpLimits(http_connections=3), "connections"),
        (HttpLimits(http_connections_per_peer=3), "connections of one peer"),
    ):
        async with serving(world, limits) as (server, bounds), AsyncExitStack() as stack:
            held = [await connect(server) for _ in range(3)]
            for _, writer in held:
                stack.callback(writer.close)
            reader, refused = await connect(server)
            stack.callback(refused.close)
            assert kind_of(await reader.read()) == (503, "Overloaded")
            assert bounds.connections.refused == {reason: 1}
            held[0][1].close()
            while bounds.connections.num_open == 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            async with httpx.AsyncClient(trust_env=False) as http:
                assert (await http.get(f"{server.url}/healthz")).status_code == 200


@pytest.mark.long
async def test_the_number_of_live_pages_is_bounded(world: World) -> None:
    """The requests arrive at the same time."""
    limits = HttpLimits(live_pages=8, live_pages_per_peer=8)
    async with serving(world, limits) as (server, bounds), AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=SOON_S))

        async def ask() -> int:
            request = http.build_request("GET", f"{server.url}/api/v1/stream")
            response = await http.send(request, stream=True)
            stack.push_async_callback(response.aclose)
            return response.status_code

        answers = await asyncio.gather(*(ask() for _ in range(20)))
        assert sorted(answers) == [200] * 8 + [503] * 12
        assert (bounds.streams.num_open, bounds.streams.num_refused) == (8, 12)


@pytest.mark.long
async def test_the_number_of_live_pages_of_a_peer_is_bounded(world: World) -> None:
    async with (
        serving(world, HttpLimits(live_pages_per_peer=1)) as (server, _),
        httpx.AsyncClient(trust_env=False) as http,
        http.stream("GET", f"{server.url}/api/v1/stream") as first,
    ):
        await anext(first.aiter_lines())
        refused = await http.get(f"{server.url}/api/v1/stream")
        assert refused.status_code == 503
        assert "127.0.0.1" in refused.json()["what"]


@pytest.mark.long
async def test_a_live_page_that_is_not_read_is_dropped(world: World) -> None:
    """The page is dropped once the kernel's buffers are full, and no longer counts."""
    record = status_world.generation(3, [f"w{i}" for i in range(1000)])
    world.change("digits", generations=tuple(replace(record, generation=i) for i in range(40)))
    async with serving(world, QUICK) as (server, bounds):
        with socket.create_connection(("127.0.0.1", server.port)) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.sendall(b"GET /api/v1/stream?job=digits HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            while not bounds.connections.refused["clients that do not read"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while bounds.streams.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.mark.long
async def test_a_large_answer_may_be_read_slowly(world: World) -> None:
    """A client over a slow link reads for longer than one may read nothing."""
    record = status_world.generation(3, [f"w{i}" for i in range(1000)])
    world.change("digits", generations=tuple(replace(record, generation=i) for i in range(60)))
    limits = HttpLimits(http_stalled_s=0.5)
    async with serving(world, limits) as (server, bounds):
        reader, writer = await connect(server)
        writer.write(
            b"GET /api/v1/jobs/digits/generations HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            b"connection: close\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        num_bytes = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        num_read = 0
        while part := await reader.read(1 << 15):
            num_read += len(part)
            await asyncio.sleep(0.01)
        writer.close()
        assert num_read == num_bytes > 4 << 20
        assert not bounds.connections.refused["clients that do not read"]


@pytest.mark.long
async def test_requests_for_another_host_are_refused(world: World) -> None:
    """DNS rebinding: an attacker's domain resolves to this server, so a browser sends that domain
    in the Host header."""
    async with (
        serving(world, HttpLimits(), "shoal.example.org") as (server, _),
        httpx.AsyncClient(trust_env=False, base_url=server.url) as http,
    ):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1].evil", ""):
            answer = await http.get("/api/v1/jobs", headers={"host": host})
            assert (answer.status_code, answer.json()["kind"]) == (421, "AccessDenied"), host
        good = ("127.0.0.1", "[::1]:7780", "localhost:7780", "coordinator:7780")
        for host in (*good, "coordinator.shoal.svc", "Shoal.example.org", socket.gethostname()):
            answer = await http.get("/api/v1/jobs", headers={"host": host})
            assert answer.status_code == 200, host


async def test_invalid_http_is_not_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A caller could fill the log with lines about invalid requests."""
    async with serving(world, HttpLimits()) as (server, _):
        for sent in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"x" * 100_000):
            reader, writer = await connect(server)
            writer.write(sent)
            assert (await reader.read(13)).startswith(b"HTTP/1.1 400")
            writer.close()
    assert [record.message for record in caplog.records if record.name != "asyncio"] == []


@pytest.mark.long
async def test_any_host_is_accepted_if_configured(world: World) -> None:
    async with (
        serving(world, HttpLimits(), "*") as (server, _),
        httpx.AsyncClient(trust_env=False) as http,
    ):
        answer = await http.get(f"{server.url}/healthz", headers={"host": "any.example"})
        assert answer.status_code == 200
