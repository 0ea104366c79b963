"""The live page in a real browser."""

import re

import pytest
from playwright.async_api import Page, expect
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_proto.errors import Unavailable
from shoal_proto.health import CourseFigures, RunOrigin, StepParts
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer
from shoal_server.status.views import ProcessView, Readiness

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)

HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"


async def test_the_page_shows_the_running_job(
    world: World, server: StatusServer, page: Page
) -> None:
    """The page shows the job's members by rank with loss and reason, and its samples, shards,
    events and generations."""
    world.put(status_world.job("abc", phase="finished", members=()))
    world.samples_of["digits"] = status_world.samples()
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    for step in range(3):
        world.board.report("digits", "w1", status_world.health("w1", step=step, loss=2.0 - step))
    world.board.event("digits", "member_lost", "w3: its stream broke", member_id="w3")
    await page.goto(server.url)
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    rows = page.get_by_role("region", name="Members").get_by_role("row")
    await expect(rows).to_have_count(4)
    await expect(rows.nth(2)).to_contain_text("nothing: it trains")
    await expect(rows.nth(2).get_by_role("img")).to_have_accessible_name(
        "Loss of w1 from 2 at step 0 to 0 at step 2"
    )
    await expect(page.get_by_role("region", name="Samples")).to_contain_text("5,000 of 14,370")
    await expect(page.get_by_role("region", name="Shards")).to_contain_text("unreachable")
    await expect(page.get_by_role("region", name="Events")).to_contain_text("w3: its stream broke")
    await expect(page.get_by_role("region", name="Generations")).to_contain_text("Generation 3")
    await expect(page.locator("#connection")).to_have_text("Live")
    assert await page.title() == "digits: running · Shoal"


async def test_the_page_has_charts_of_a_job(world: World, server: StatusServer, page: Page) -> None:
    """Charts of loss, throughput, step times and staleness are also described in words; generations
    have the pauses of changes."""
    status_world.charted(world.board)
    await page.goto(f"{server.url}/?job=digits")
    charts = page.get_by_role("region", name="Charts")
    loss = charts.get_by_role("slider", name="Loss from")
    await expect(loss).to_have_count(1)
    assert "over 4 min" in str(await loss.get_attribute("aria-label"))
    await expect(charts.get_by_role("slider", name="Step time from 10 ms")).to_have_count(1)
    await expect(charts.get_by_role("slider", name="Samples per second")).to_have_count(1)
    await expect(charts.get_by_role("slider", name="Staleness")).to_have_count(1)
    generations = page.get_by_role("region", name="Generations")
    await expect(generations).to_contain_text("paused 0.06 s")


async def test_a_slow_member_is_marked(world: World, server: StatusServer, page: Page) -> None:
    for name, step_time_s in (("w0", 0.01), ("w1", 0.011), ("w2", 0.03)):
        world.board.report("digits", name, status_world.health(name, step_time_s=step_time_s))
    await page.goto(f"{server.url}/?job=digits")
    rows = page.get_by_role("region", name="Members").get_by_role("row")
    await expect(rows.filter(has_text="slow")).to_have_count(1)
    await expect(rows.nth(3)).to_contain_text("slow")


async def test_the_page_opens_with_a_job_that_runs(
    world: World, server: StatusServer, page: Page
) -> None:
    """A failed job before it in the list is not over as a finished one is, but does not run."""
    world.put(status_world.job("a-failed", phase="failed", reason="no", members=()))
    await page.goto(server.url)
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")


async def test_many_jobs_can_be_filtered(world: World, server: StatusServer, page: Page) -> None:
    """The filter matches words of names and states, and stays while the page is updated."""
    for number in range(200):
        phase = "running" if number % 2 else "finished"
        world.put(status_world.job(f"job-{number:03}", phase=phase, state=phase, members=()))
    await page.goto(f"{server.url}/?job=digits")
    jobs = page.locator("#jobs a")
    await expect(jobs).to_have_count(201)
    await page.get_by_role("searchbox", name="Filter jobs").fill("job-01 finished")
    await expect(jobs).to_have_count(5)
    world.change("digits", reason="another one")
    await expect(page.locator(".reason")).to_have_text("another one")
    await expect(jobs).to_have_count(5)
    await expect(page.locator("#jobs h2")).to_contain_text("5 of 201")


async def test_the_end_of_a_long_job_name_is_visible(
    world: World, server: StatusServer, page: Page
) -> None:
    """The middle of the name is left out; hover text and screen readers have the whole name."""
    names = [f"train_fsdp_on_the_large_data-c8234{number}" for number in range(3)]
    for name in names:
        world.put(status_world.job(name))
    await page.goto(f"{server.url}/?job=digits")
    for name in names:
        link = page.get_by_role("link", name=name)
        await expect(link).to_have_count(1)
        await expect(link.locator(".name")).to_have_attribute("title", name)
        end = link.get_by_text(name[-7:], exact=True)
        assert await end.evaluate("(n) => n.scrollWidth <= n.clientWidth && n.clientWidth > 20")


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        (False, "No checkpoints are configured: if all members were lost, the job would be lost."),
        (True, "No checkpoint is written yet: if all members were lost, the job would continue"),
    ],
)
async def test_the_page_shows_if_a_job_has_no_checkpoint(
    world: World, server: StatusServer, page: Page, writes: bool, message: str
) -> None:
    course = CourseFigures(writes_checkpoints=writes)
    world.board.report("digits", "w0", status_world.health("w0", course=course))
    await page.goto(f"{server.url}/?job=digits")
    saved = page.get_by_role("region", name="Saved")
    await expect(saved).to_contain_text(message)
    written = CourseFigures(writes_checkpoints=True, checkpoint_step=1000, checkpoint_bytes=3 << 30)
    world.board.report("digits", "w0", status_world.health("w0", course=written))
    await expect(saved).to_contain_text("step 1,000, 200 steps ago, written ")
    await expect(saved).to_contain_text(" ago, 3.0 GiB")
    await expect(saved).not_to_contain_text(message)


async def test_the_page_shows_command_commit_and_hyperparameters(
    world: World, server: StatusServer, page: Page
) -> None:
    """Command line and commit are below the job's name, and hyperparameters in the settings. A long
    command line can be scrolled."""
    run = RunOrigin(command="train.py --token *** --lr 0.1", commit="5f" * 20, is_modified=True)
    course = CourseFigures(run=run)
    world.board.report("digits", "w0", status_world.health("w0", course=course))
    fields = {"strategy": "ddp", "global_batch": "96", "optimizer": "SGD(lr=0.1 parameters=4)"}
    world.change("digits", fields={**fields, "schema": "5f" * 32})
    await page.goto(f"{server.url}/?job=digits")
    origin = page.locator(".origin")
    await expect(origin).to_have_text("train.py --token *** --lr 0.1 commit 5f5f5f5f5f5f, modified")
    await expect(page.get_by_role("region", name="Settings").locator("dt:visible")).to_have_text(
        ["strategy", "global batch", "optimizer", "lr"]
    )
    long = RunOrigin(command=f"train.py {'--layer conv ' * 250}")
    world.board.report("digits", "w0", status_world.health("w0", course=CourseFigures(run=long)))
    command = origin.locator(".command")
    await expect(command).to_have_attribute("tabindex", "0")
    assert await command.evaluate("(n) => n.scrollHeight > n.clientHeight && n.clientHeight < 120")


async def test_members_are_shown_with_their_usage_of_resources(
    world: World, server: StatusServer, page: Page
) -> None:
    """A member's row has its processors and its host's traffic, whose column is left out if no
    member reports it."""
    await page.goto(f"{server.url}/?job=digits")
    row = page.get_by_role("region", name="Members").get_by_role("row").nth(1)
    await expect(row).to_contain_text("w0")
    await expect(page.get_by_role("columnheader", name="Host's network")).to_have_count(0)
    usage = {"cpu_cores": 1.503, "host_received_bytes_per_s": 3 << 20, "host_sent_bytes_per_s": 0}
    world.board.report("digits", "w0", status_world.health("w0", **usage))
    await expect(row).to_contain_text("1.5 cores")
    await expect(row).to_contain_text("3.0 MiB/s in0 B/s out")


async def test_members_are_shown_with_the_parts_of_a_steps_time(
    world: World, server: StatusServer, page: Page
) -> None:
    """The exchange lasts as long as for the member that waits least; the rest of others' exchange
    is waiting. The member's dialog has the numbers as well."""
    for name, compute_s, exchange_s in (("w0", 0.004, 0.003), ("w1", 0.006, 0.001)):
        parts = StepParts(
            data_s=0.001, compute_s=compute_s, exchange_s=exchange_s, between_s=0.0005
        )
        world.board.report("digits", name, status_world.health(name, step_parts=parts))
    await page.goto(f"{server.url}/?job=digits")
    rows = page.get_by_role("region", name="Members").get_by_role("row")
    bars = [rows.nth(number).locator(".parts") for number in (1, 2)]
    shown = (
        "data 1 ms, computing 4 ms, exchange 1 ms, waiting for others 2 ms, between steps 0.5 ms"
    )
    await expect(bars[0]).to_have_accessible_name(shown)
    await expect(bars[1]).to_have_accessible_name(re.compile("computing 6 ms.*others 0 ms"))
    assert await bars[0].locator("i.compute").evaluate("(n) => n.style.width") == "47.1%"
    await rows.nth(1).get_by_role("button", name="w0").click()
    await expect(page.get_by_role("dialog", name="Member")).to_contain_text(shown)


async def test_an_interrupted_job_shows_how_its_last_member_ended(
    world: World, server: StatusServer, page: Page
) -> None:
    world.change("digits", phase="collect", state="interrupted", members=())
    reason = "w1 left: RuntimeError: out of memory"
    world.board.event("digits", "member_removed", reason, member_id="w1")
    await page.goto(f"{server.url}/?job=digits")
    state = page.locator("h1 + .pill")
    await expect(state).to_have_text("interrupted")
    await expect(state).to_have_class("pill bad")
    await expect(page.locator(".title + .error")).to_contain_text(reason)


async def test_an_update_keeps_open_details_and_the_focus(
    world: World, server: StatusServer, page: Page
) -> None:
    """The page is updated without a reload."""
    world.shards_of["digits"] = status_world.shards()
    await page.goto(f"{server.url}/?job=digits")
    detail = page.locator("details").first
    await detail.locator("summary").click()
    await page.get_by_role("link", name="digits").focus()
    world.change("digits", phase="collect", reason="w4 joins")
    await expect(page.locator("h1 + .pill")).to_have_text("waiting")
    await expect(page.locator(".reason")).to_have_text("w4 joins")
    assert await detail.get_attribute("open") is not None
    assert await page.evaluate("document.activeElement.dataset.job") == "digits"


async def test_text_of_workers_is_not_html(world: World, server: StatusServer, page: Page) -> None:
    """Reasons, errors, fields and devices are shown literally."""
    process = ProcessView(host=HOSTILE, device=HOSTILE)
    hostile = status_world.member("w0", 0, waiting_for=HOSTILE, process=process)
    record = status_world.generation(
        1, ["w0"], reason=HOSTILE, verdict="aborted", conflicts=(status_world.conflict(),)
    )
    world.change("digits", members=(hostile,), generations=(record,), reason=HOSTILE)
    world.change("digits", fields={"strategy": HOSTILE})
    world.board.event("digits", "member_lost", HOSTILE, member_id=HOSTILE)
    world.board.report(
        "digits", "w0", status_world.health("w0", last_error=HOSTILE, device=HOSTILE)
    )
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.locator(".reason")).to_have_text(HOSTILE)
    await expect(page.locator("td.why .error")).to_have_text(HOSTILE)
    assert await page.locator("main img, main script").count() == 0
    assert await page.evaluate("window.hit") is None


async def test_a_lost_connection_is_shown_and_made_again(
    world: World, server: StatusServer, page: Page
) -> None:
    """The page dims the last state, and reconnects once the server is back."""
    app = build_app(world, world.board)
    async with StatusServer(app, "127.0.0.1", 0) as first:
        port = first.port
        await page.goto(f"{first.url}/?job=digits")
        await expect(page.locator("#connection")).to_have_text("Live")
    await expect(page.locator("#connection")).to_contain_text("Connection lost", timeout=10_000)
    await expect(page.locator("body")).to_have_class("stale")
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    async with StatusServer(build_app(world, world.board), "127.0.0.1", port):
        await expect(page.locator("#connection")).to_have_text("Live", timeout=15_000)
        await expect(page.locator("body")).not_to_have_class("stale")


async def test_jobs_are_chosen_by_keyboard(world: World, server: StatusServer, page: Page) -> None:
    """Tab and Enter choose a job, the page's URL names it, and Back returns to the last one."""
    world.put(status_world.job("other", reason="the other one"))
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.locator("nav a[aria-current]")).to_contain_text("digits")
    for _ in range(4):  # skip link, brand, first job, second job
        await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text("other")
    assert page.url.endswith("?job=other")
    await page.go_back()
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")


async def test_problems_have_their_reason(world: World, server: StatusServer, page: Page) -> None:
    """The coordinator is not ready, shards cannot be read, the job is not read yet, or there is no
    such job."""
    world.ready = Readiness(ready=False, reason="etcd is away")
    world.shards_error = Unavailable("etcd does not answer")
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.get_by_role("alert")).to_have_text("Not ready: etcd is away")
    await expect(page.get_by_role("region", name="Shards")).to_contain_text("etcd does not answer")
    world.unread.add("digits")
    await expect(page.locator("#job")).to_contain_text("is reading this job from etcd")
    await page.goto(f"{server.url}/?job=nope")
    await expect(page.get_by_role("heading", level=1)).to_have_text("There is no job nope")
    world.by_name.clear()
    await page.goto(server.url)
    heading = page.get_by_role("heading", level=1)
    await expect(heading).to_have_text("This coordinator does not lead")
    world.ready = Readiness(ready=True, reason="leading")
    await expect(heading).to_have_text("No jobs yet")


@pytest.mark.parametrize("width", [390, 820, 1440])
async def test_nothing_is_cut_off_at_any_width(
    world: World, server: StatusServer, page: Page, width: int
) -> None:
    """The page does not scroll sideways, with long names and reasons."""
    long_name = "m" * 120
    world.change("digits", members=(status_world.member(long_name, 0),), reason="r" * 400)
    world.board.event("digits", "member_lost", "e" * 400)
    world.shards_of["digits"] = status_world.shards()
    status_world.charted(world.board)
    await page.set_viewport_size({"width": width, "height": 800})
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    await expect(page.locator(".chart .uplot")).not_to_have_count(0)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast(
    world: World, server: StatusServer, page: Page, scheme: str
) -> None:
    """The contrast is at least 4.5 to 1, in light and in dark."""
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    world.samples_of["digits"] = status_world.samples()
    world.board.event("digits", "member_lost", "w3 is gone")
    states = ("training", "waiting", "preparing", "disconnected", "standby")
    world.change(
        "digits",
        members=tuple(status_world.member(f"w{i}", i, state=s) for i, s in enumerate(states)),
    )
    status_world.charted(world.board)
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
    await expect(page.locator(".chart .uplot")).not_to_have_count(0)
    poor = await page.evaluate(CONTRAST)
    assert poor == []


CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("noscript, .hidden, .skip")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
