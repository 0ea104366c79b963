import shutil
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from playwright.async_api import Page, async_playwright
from support.clusters import status_world

from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer


@pytest.fixture(scope="session")
def shown() -> tuple[status_world.World, FastAPI]:
    """Return a world and the application that shows it, which takes long to build."""
    world = status_world.World()
    return world, build_app(world, world.board)


@pytest.fixture
def world(shown: tuple[status_world.World, FastAPI]) -> status_world.World:
    """Return a world that runs one job, `digits`, with members w0, w1 and w2."""
    world, _ = shown
    world.renew()
    world.put(status_world.job())
    return world


@pytest_asyncio.fixture
async def server(
    world: status_world.World, shown: tuple[status_world.World, FastAPI]
) -> AsyncIterator[StatusServer]:
    async with StatusServer(shown[1], "127.0.0.1", 0) as server:
        yield server


@pytest_asyncio.fixture
async def http(server: StatusServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client


@pytest_asyncio.fixture
async def page() -> AsyncIterator[Page]:
    """Open a page; the test fails on a script error, a blocked resource or a request to
    elsewhere."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("no chromium on PATH; on Debian: apt-get install chromium")
    problems: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda line: problems.append(line.text) if "Content Security" in line.text else None,
        )
        page.on("request", lambda request: problems.extend(foreign(request.url)))
        yield page
        await browser.close()
    assert problems == []


def foreign(url: str) -> list[str]:
    """Return the URL, if it does not belong to the page's own server."""
    return [] if url.startswith(("http://127.0.0.1:", "data:")) else [url]
