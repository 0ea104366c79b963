"""Actions on the page in a real browser, the dialog of a member, and screenshots."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageFilter
from playwright.async_api import Page, Route, expect
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_proto.errors import InvalidSpec
from shoal_proto.health import CourseFigures, RunOrigin, StepParts
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.access import tokens
from shoal_server.status.access.guard import Guard
from shoal_server.status.access.tokens import HttpRole, Tokens
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

pytestmark = pytest.mark.browser

SHOTS = Path(__file__).parent / "screenshots"
MAX_DIFFERENT = 0.02
"""Share of blurred pixels that may differ: other machines draw fonts a little differently."""
STRONG = 60


@dataclass
class RecordedCalls:
    """Operations that record their calls."""

    calls: list[tuple[str, ...]] = field(default_factory=list)

    async def stop(self, job: str, reason: str, who: CallerProof) -> None:
        self.calls.append(("stop", job, reason))

    async def retry(self, job: str, who: CallerProof) -> None:
        self.calls.append(("retry", job))

    async def snapshot(self, job: str, who: CallerProof) -> None:
        raise InvalidSpec(f"no place for snapshots of {job}", expected="--snapshot-url")

    async def drain(self, job: str, member_id: str, reason: str, who: CallerProof) -> None:
        self.calls.append(("drain", job, member_id, reason))


@asynccontextmanager
async def acting(
    world: World, guard: Guard | None = None, port: int = 0
) -> AsyncIterator[tuple[str, RecordedCalls]]:
    recorded = RecordedCalls()
    app = build_app(world, world.board, guard=guard, operations=recorded)
    async with StatusServer(app, "127.0.0.1", port) as server:
        yield server.url, recorded


async def test_a_job_is_stopped_after_a_confirmation(world: World, page: Page) -> None:
    """The dialog can be opened and left by keyboard. Escape sends no request; Yes sends the
    reason."""
    async with acting(world) as (url, recorded):
        await page.goto(f"{url}/?job=digits")
        stop = page.get_by_role("button", name="Stop the job")
        await stop.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name="Stop digits?")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#ask")).not_to_be_visible()
        assert recorded.calls == []
        await stop.click()
        await page.get_by_label("Reason").fill("wrong data")
        await page.get_by_role("button", name="Yes").click()
        await expect(page.locator("#done")).to_contain_text("asked to stop")
        assert recorded.calls == [("stop", "digits", "wrong data")]


async def test_a_refused_action_is_shown_with_its_error(world: World, page: Page) -> None:
    world.shards_of["digits"] = status_world.shards()
    async with acting(world) as (url, _):
        await page.goto(f"{url}/?job=digits")
        await page.get_by_role("button", name="Take a snapshot").click()
        await page.get_by_role("button", name="Yes").click()
        outcome = page.locator("#ask-outcome")
        await expect(outcome).to_contain_text("no place for snapshots of digits")
        await expect(outcome).to_contain_text("expected --snapshot-url")


async def test_a_late_answer_leaves_another_question_open(world: World, page: Page) -> None:
    world.shards_of["digits"] = status_world.shards()
    async with acting(world) as (url, _):
        answered = asyncio.Event()

        async def later(route: Route) -> None:
            await answered.wait()
            await route.continue_()

        await page.route("**/snapshot", later)
        await page.goto(f"{url}/?job=digits")
        await page.get_by_role("button", name="Take a snapshot").click()
        await page.get_by_role("button", name="Yes").click()
        await page.keyboard.press("Escape")
        await page.get_by_role("button", name="Stop the job").click()
        answered.set()
        await expect(page.locator("#done")).to_contain_text("no place for snapshots of digits")
        await expect(page.get_by_role("dialog", name="Stop digits?")).to_be_visible()
        await expect(page.locator("#ask-outcome")).to_have_text("")


async def test_a_members_dialog_has_its_host_and_a_drain_button(world: World, page: Page) -> None:
    world.board.event("digits", "member_joined", "w1 joined from node-0", member_id="w1")
    async with acting(world) as (url, recorded):
        await page.goto(f"{url}/?job=digits")
        await page.get_by_role("button", name="w1", exact=True).click()
        shown = page.get_by_role("dialog", name="Member")
        await expect(shown).to_contain_text("node-0")
        await expect(shown).to_contain_text("w1 joined from node-0")
        await shown.get_by_role("button", name="Drain this member").click()
        await page.get_by_role("button", name="Yes").click()
        await expect(page.locator("#done")).to_contain_text("asked to leave")
        assert recorded.calls == [("drain", "digits", "w1", "")]


async def test_back_closes_a_members_dialog(world: World, page: Page) -> None:
    """Another job may have a member of the same name: its button must not be within reach."""
    world.put(status_world.job("other"))
    async with acting(world) as (url, _):
        await page.goto(f"{url}/?job=other")
        await page.locator("#jobs").get_by_role("link", name="digits").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
        await page.get_by_role("button", name="w1", exact=True).click()
        shown = page.get_by_role("dialog", name="Member")
        await expect(shown).to_be_visible()
        await page.go_back()
        await expect(shown).to_be_hidden()
        await expect(page.get_by_role("heading", level=1)).to_have_text("other")


async def test_a_page_whose_session_has_ended_asks_for_a_token_again(
    world: World, page: Page, tmp_path: Path
) -> None:
    """Sessions are in the coordinator's memory."""
    file = tmp_path / "tokens"
    secret = tokens.add(file, "ann", HttpRole.VIEWER)
    guard = Guard(Tokens(file))
    async with acting(world, guard) as (url, _):
        await page.goto(f"{url}/?job=digits")
        await page.get_by_label("This page requires a token").fill(secret)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.locator("#connection")).to_have_text("Live")
        port = int(url.rpartition(":")[2])
    async with acting(world, Guard(Tokens(file)), port):
        field = page.get_by_label("This page requires a token")
        await expect(field).to_be_visible(timeout=15_000)
        await expect(page.locator("#login-error")).to_contain_text("The session has ended")


async def test_a_viewer_sees_no_buttons_of_actions(
    world: World, page: Page, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    secret = tokens.add(file, "ann", HttpRole.VIEWER)
    async with acting(world, Guard(Tokens(file))) as (url, _):
        await page.goto(f"{url}/?job=digits")
        await page.get_by_label("This page requires a token").fill(secret)
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("digits")
        await expect(page.get_by_role("button", name="Log out ann")).to_be_visible()
        await expect(page.get_by_role("button", name="Stop the job")).to_have_count(0)


async def test_the_page_shows_progress_and_logged_values(
    world: World, server: StatusServer, page: Page
) -> None:
    """The page also shows the time left, the newest checkpoint and settings."""
    status_world.charted(world.board)
    for step in range(1, 6):
        report = status_world.health(
            "w0",
            step=240 * step,
            course=CourseFigures(
                num_steps=2400,
                checkpoint_step=1000,
                logged={"accuracy": (240 * step, 0.5 + step / 20)},
            ),
        )
        world.board.report("digits", "w0", report)
    await page.goto(f"{server.url}/?job=digits")
    bar = page.get_by_role("progressbar", name="Progress")
    await expect(bar).to_have_attribute("aria-valuenow", "50.0")
    assert "left at the recent pace" in str(await bar.get_attribute("aria-valuetext"))
    chart = page.get_by_role("slider", name="accuracy from 0.55 to 0.75 to step 1,200")
    await expect(chart).to_have_count(1)
    saved = page.get_by_role("region", name="Saved")
    await expect(saved).to_contain_text("step 1,000, 200 steps ago")
    settings = page.get_by_role("region", name="Settings")
    await settings.locator("summary").click()
    await expect(settings).to_contain_text("global_batch")


async def test_of_a_thousand_members_disconnected_and_slow_ones_are_first(
    world: World, server: StatusServer, page: Page
) -> None:
    """Fifty members are shown, and all on request."""
    members = [status_world.member(f"w{n}", n) for n in range(1000)]
    members[777] = replace(members[777], state="disconnected")
    world.change("digits", members=tuple(members))
    for name, step_time_s in (("w1", 0.01), ("w2", 0.01), ("w3", 0.01), ("w998", 0.1)):
        world.board.report("digits", name, status_world.health(name, step_time_s=step_time_s))
    await page.goto(f"{server.url}/?job=digits")
    table = page.get_by_role("region", name="Members")
    rows = table.locator("tbody tr")
    await expect(rows).to_have_count(50)
    await expect(rows.nth(0)).to_contain_text("w777")
    await expect(rows.nth(1)).to_contain_text("slow")
    await page.get_by_role("button", name="Show all 1,000").click()
    await expect(rows).to_have_count(1000)
    await page.get_by_role("button", name="Show fewer").click()
    await expect(rows).to_have_count(50)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
async def test_the_page_has_not_changed(world: World, page: Page, scheme: str, width: int) -> None:
    """SHOAL_NEW_SCREENSHOTS=1 writes the files in `screenshots/` anew; look at them before a
    commit."""
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    world.samples_of["digits"] = status_world.samples()
    status_world.charted(world.board)
    run = RunOrigin(command="train.py --lr 0.1 --token ***", commit="5f" * 20, is_modified=True)
    parts = StepParts(data_s=0.001, compute_s=0.006, exchange_s=0.003, between_s=0.001)
    for name in ("w0", "w1", "w2"):
        for step in range(20):
            report = status_world.health(
                name,
                step=60 * (step + 1),
                loss=2.0 / (step + 1),
                step_time_s=0.01,
                samples_per_s=640.0,
                memory_bytes=3 << 30,
                cpu_cores=1.25,
                host_received_bytes_per_s=80 << 20,
                host_sent_bytes_per_s=75 << 20,
                step_parts=parts,
                course=CourseFigures(
                    num_steps=2400,
                    run=run,
                    logged={"accuracy": (60 * (step + 1), 1 - 1 / (step + 2))},
                ),
            )
            world.board.report("digits", name, report)
    async with acting(world) as (url, _):
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        await page.goto(f"{url}/?job=digits")
        await expect(page.locator(".chart .uplot")).not_to_have_count(0)
        dynamic = [
            page.locator(each) for each in ("time", "#clock", ".charts", ".section header p")
        ]
        shot = await page.screenshot(mask=dynamic, mask_color="#808080", full_page=False)
    path = SHOTS / f"job-{width}-{scheme}.png"
    if os.environ.get("SHOAL_NEW_SCREENSHOTS"):
        SHOTS.mkdir(exist_ok=True)
        path.write_bytes(shot)
    seen, expected = (Image.open(BytesIO(each)).convert("L") for each in (shot, path.read_bytes()))
    assert seen.size == expected.size
    blur = ImageFilter.GaussianBlur(3)
    difference = ImageChops.difference(seen.filter(blur), expected.filter(blur))
    strong = sum(difference.histogram()[STRONG:])
    assert strong / (seen.width * seen.height) < MAX_DIFFERENT
