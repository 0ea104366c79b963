"""The HTTP server inside another program's event loop."""

import asyncio
import os
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from support.clusters.status_world import World
from support.processes.load import unhurried

from shoal_client.certificates.folder import CertificateFolder
from shoal_proto.errors import AddressInUse, InvalidSpec
from shoal_proto.tls import identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import COORDINATOR_NAME, CertificateRole
from shoal_server.coordinator.config import CoordinatorConfig
from shoal_server.serving.admission.config import HttpLimits
from shoal_server.status.access import tokens
from shoal_server.status.access.guard import Guard
from shoal_server.status.access.tokens import HttpRole, Tokens
from shoal_server.status.app import build_app
from shoal_server.status.http.bounds import HttpBounds
from shoal_server.status.serve import StatusServer


@pytest.mark.long
async def test_the_error_for_a_port_in_use_has_its_address(world: World) -> None:
    """The error is AddressInUse."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{port}"):
            async with StatusServer(build_app(world, world.board), "127.0.0.1", port):
                pytest.fail("it must not serve")


async def test_the_error_for_an_address_of_another_machine_has_it(world: World) -> None:
    """The error is AddressInUse as well."""
    with pytest.raises(AddressInUse, match=r"192\.0\.2\.1:0"):
        async with StatusServer(build_app(world, world.board), "192.0.2.1", 0):
            pytest.fail("it must not serve")


@pytest.mark.long
async def test_the_port_is_free_again_after_the_server(world: World) -> None:
    """A second server can use the same port at once."""
    async with StatusServer(build_app(world, world.board), "127.0.0.1", 0) as first:
        port = first.port
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{first.url}/healthz")).status_code == 200
    async with StatusServer(build_app(world, world.board), "127.0.0.1", port) as second:
        assert second.port == port


@pytest.mark.long
async def test_signals_are_left_to_the_process(world: World) -> None:
    """The handlers of the loop's owner are called, and the server serves on."""
    caught = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, caught.set)
    try:
        async with StatusServer(build_app(world, world.board), "127.0.0.1", 0) as server:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(caught.wait(), 5)
            async with httpx.AsyncClient(trust_env=False) as http:
                assert (await http.get(f"{server.url}/healthz")).status_code == 200
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


@pytest.mark.long
async def test_an_open_page_does_not_delay_the_end_of_the_server(world: World) -> None:
    """The live stream of the page ends with the server, within 1.5 s."""
    async with httpx.AsyncClient(trust_env=False) as http:
        async with StatusServer(build_app(world, world.board), "127.0.0.1", 0) as server:
            request = http.build_request("GET", f"{server.url}/api/v1/stream?job=digits")
            response = await http.send(request, stream=True)
            lines = response.aiter_lines()
            assert await anext(lines) == "event: state"
            started_s = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - started_s < unhurried(1.5)
        await response.aclose()


@pytest.mark.long
async def test_the_number_of_live_pages_is_bounded(world: World) -> None:
    """A stream beyond the limit is answered with 503. A closed stream no longer counts."""
    bounds = HttpBounds(HttpLimits(live_pages=1))
    app = build_app(world, world.board, bounds=bounds)
    async with (
        StatusServer(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        url = f"{server.url}/api/v1/stream"
        async with http.stream("GET", url) as last:
            await anext(last.aiter_lines())
            refused = await http.get(url)
            assert refused.status_code == 503
            assert refused.json()["kind"] == "Overloaded"
        async with asyncio.timeout(5):
            # The server notices at its next write, which sends no event.
            while bounds.streams.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.mark.long
async def test_over_tls_a_browser_without_a_certificate_needs_a_token(
    world: World, tmp_path: Path
) -> None:
    """A server without tokens accepts no connection without a certificate."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init(hosts=["127.0.0.1"])
    secret = tokens.add(tmp_path / "tokens", "ann", HttpRole.VIEWER)
    app = build_app(world, world.board, guard=Guard(Tokens(tmp_path / "tokens")))
    browser = ssl.create_default_context(cafile=str(folder.path / "ca.crt"))
    with identity.using(in_folder(folder.path, CertificateRole.COORDINATOR)):
        async with (
            StatusServer(app, "127.0.0.1", 0) as closed,
            StatusServer(app, "127.0.0.1", 0, clients="token") as opened,
            httpx.AsyncClient(trust_env=False, verify=browser) as http,
        ):
            with pytest.raises(httpx.HTTPError):
                await http.get(f"{closed.url}/healthz")
            assert (await http.get(f"{opened.url}/healthz")).status_code == 200
            jobs = f"{opened.url}/api/v1/jobs"
            assert (await http.get(jobs)).status_code == 401
            known = {"authorization": f"Bearer {secret}"}
            assert (await http.get(jobs, headers=known)).status_code == 200
            # A certificate is accepted, but is not a token.
            own = identity.own()
            assert own is not None
            async with httpx.AsyncClient(trust_env=False, verify=own.material.client) as holder:
                answer = await holder.get(jobs, extensions={"sni_hostname": COORDINATOR_NAME})
            assert answer.status_code == 401


def test_clients_by_token_need_a_file_of_tokens() -> None:
    with pytest.raises(InvalidSpec, match=r"anybody could read.*--http-tokens"):
        CoordinatorConfig(http_clients="token")
