"""The live page over a large cluster, in a real Chromium: 200 jobs, of which one has 1,000 members.

    make bench NAME=page
    .venv/bin/python bench/page.py 5      # first paints

A real coordinator on a real etcd. Simulated members as in bench/membership.py attend, agree, send
heartbeats over gRPC and report their health. Everything shares the cores of this machine.

`page_first_paint_s`: CPU time of the page's main thread, from a trace of Chromium's, from opening
the page until all of it is shown. `page_update_s`: CPU time of one update; the page has one a
second. `page_update_all_members_s`: the same with all members shown. `page_viewers_20_cores`: extra
CPU cores of the coordinator for 20 open pages, half of which show the large job.
`page_bytes_per_s`: bytes sent to such a page in a second, on average.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from many_jobs import Coordinators, job_that_is_over
from membership import Drivers
from playwright.sync_api import Browser, Page, sync_playwright
from rows import Row, publish

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import Supervisor
from shoal_client.local.start_time import cpu_s
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

NUM_JOBS, NUM_MEMBERS, NUM_VIEWERS = 200, 1000, 20
NUM_REPORTS = 20
JOB = "scale"
MEASURE_S, UPDATES_S = 20.0, 10.0
SHOWN = (
    f"document.querySelectorAll('#jobs li').length >= {NUM_JOBS}"
    " && document.querySelectorAll('.members tbody tr').length > 40"
)
SHOWN_WITHIN_S = 60.0
TASK = "ThreadControllerImpl::RunTask"  # Chromium's name of a task in its trace
DRIVER = Path(__file__).with_name("page_driver.py")


async def write_jobs(endpoint: str) -> None:
    """Write all jobs but the large one, as finished."""
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        for number in range(NUM_JOBS - 1):
            await store.transact((), job_that_is_over(f"over-{number:04d}"))


class Viewers:
    """Open pages without a browser: each reads its stream, and counts the bytes."""

    def __init__(self, url: str, jobs: list[str]) -> None:
        self.num_bytes = [0] * len(jobs)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._looking: list[asyncio.Task[None]] = []
        asyncio.run_coroutine_threadsafe(self._begin(url, jobs), self._loop).result()

    async def _begin(self, url: str, jobs: list[str]) -> None:
        for number, job in enumerate(jobs):
            self._looking.append(asyncio.create_task(self._look(url, job, number)))

    async def _look(self, url: str, job: str, number: int) -> None:
        host = urlsplit(url).netloc
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(f"GET /api/v1/stream?job={job} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        try:
            while data := await reader.read(1 << 18):
                self.num_bytes[number] += len(data)
        finally:
            writer.close()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        for each in self._looking:
            each.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)


def cores(pid: int, for_s: float) -> float:
    before_s, start_s = cpu_s(pid), time.monotonic()
    time.sleep(for_s)
    return (cpu_s(pid) - before_s) / (time.monotonic() - start_s)


def main_thread_s(trace: bytes) -> float:
    """CPU seconds of the tasks of the page's main thread. `Performance.getMetrics` no longer counts
    CPU time: in Chromium 156 it gives wall-clock time, whatever its time domain."""
    events = json.loads(trace)["traceEvents"]
    main = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    used_us: Counter[tuple[int, int]] = Counter()
    for each in events:
        thread = each["pid"], each["tid"]
        if thread in main and each["name"] == TASK:
            used_us[thread] += each.get("tdur", 0)
    # The browser keeps renderers for other pages, which are idle.
    return max(used_us.values(), default=0) / 1e6


def opened(browser: Browser, page: Page, url: str) -> float:
    """Open the page, and wait until it shows the job. Returns CPU seconds of its main thread."""
    session = page.context.new_cdp_session(page)
    browser.start_tracing(page=page, categories=["toplevel"])
    page.goto(f"{url}/?job={JOB}")
    # Playwright's own wait would run a script in the page's main thread.
    give_up_s = time.monotonic() + SHOWN_WITHIN_S
    while not session.send("Runtime.evaluate", {"expression": SHOWN})["result"]["value"]:
        if time.monotonic() > give_up_s:
            raise SystemExit(f"the page does not show the job within {SHOWN_WITHIN_S:g} s")
        time.sleep(0.05)
    return main_thread_s(browser.stop_tracing())


def update_s(browser: Browser, page: Page) -> float:
    """CPU seconds of the page's main thread for one update."""
    page.evaluate(
        "() => { window.updates = 0; page.stream.addEventListener('state', () => updates++); }"
    )
    browser.start_tracing(page=page, categories=["toplevel"])
    page.wait_for_timeout(1000 * UPDATES_S)
    used_s, updates = main_thread_s(browser.stop_tracing()), int(page.evaluate("window.updates"))
    if not updates:
        raise SystemExit("the page had no update")
    return used_s / updates


def in_browser(url: str, num_runs: int) -> tuple[list[float], float, float]:
    """Return the times of first paints, and of an update with 50 members and with all of them."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no chromium on PATH; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        paints = []
        for _ in range(num_runs):
            # A new browser for each page: pages of one browser may share a process.
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            paints.append(opened(browser, page, url))
            if len(paints) < num_runs:
                browser.close()
        few = update_s(browser, page)
        page.click("button[data-members=all]")
        page.locator(".members tbody tr").nth(NUM_MEMBERS - 1).wait_for()
        every = update_s(browser, page)
        browser.close()
    return paints, few, every


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor, ExitStack() as stack:
        directory = Path(name)
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd")
        asyncio.run(write_jobs(etcd.endpoint))
        coordinators = Coordinators(supervisor, directory, etcd.endpoint)
        # Long heartbeats, so that no member is lost while the machine is busy.
        coordinators.start(options=("--heartbeat-s", "5"))
        process, address, url = coordinators.leader
        drivers = Drivers(stack, address, JOB, NUM_MEMBERS, driver=DRIVER)
        drivers.ask("attend")
        drivers.ask("propose all")
        drivers.ask("committed")
        drivers.ask("ready")
        drivers.ask(f"report {url} {NUM_REPORTS}")
        print("all members train and have reported", flush=True)
        without = cores(process.pid, MEASURE_S)
        jobs = [JOB if n % 2 else f"over-{n:04d}" for n in range(NUM_VIEWERS)]
        viewers = Viewers(url, jobs)
        time.sleep(2.0)
        before, start_s = sum(viewers.num_bytes), time.monotonic()
        watched = cores(process.pid, MEASURE_S)
        sent = (sum(viewers.num_bytes) - before) / (time.monotonic() - start_s) / NUM_VIEWERS
        viewers.close()
        print(f"{without:.3f} cores without viewers, {watched:.3f} with {NUM_VIEWERS}", flush=True)
        paints, few, every = in_browser(url, num_runs)
        if failed := [text for state in drivers.ask("state") for text in state["failures"]]:
            raise SystemExit(f"some members were lost: {failed}")

    def row(metric: str, value: float, unit: str, runs: int = 1) -> Row:
        return Row(metric=metric, value=value, unit=unit, runs=runs)

    publish(
        "page",
        [
            row("page_first_paint_s", median(paints), "s", num_runs),
            row("page_update_s", few, "s"),
            row("page_update_all_members_s", every, "s"),
            row("page_viewers_20_cores", watched - without, "cores"),
            row("page_bytes_per_s", sent, "bytes"),
        ],
    )


if __name__ == "__main__":
    main()
