"""Output of members, on the page in a real browser."""

import pytest
from playwright.async_api import Page, expect
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_server.status.serve import StatusServer

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)

HOSTILE = "<img src=x onerror='window.hit=1'>"


async def test_a_members_dialog_shows_its_output(
    world: World, server: StatusServer, page: Page
) -> None:
    """The dialog shows the newest lines, earlier ones on request, and new ones as they are printed.
    The page sends no request once the dialog is closed."""
    world.printed["w1"] = [f"line {number}" for number in range(120)] + [HOSTILE]
    await page.goto(f"{server.url}/?job=digits")
    await page.get_by_role("button", name="w1", exact=True).focus()
    await page.keyboard.press("Enter")
    shown = page.get_by_role("dialog", name="Member")
    output = shown.get_by_role("log", name="Output of w1")
    await expect(output).to_contain_text(f"line 119\n{HOSTILE}")
    await expect(output).not_to_contain_text("line 70\n")
    await expect(shown.get_by_role("status")).to_have_text("From the launcher on node-0")
    await expect(shown).to_contain_text("shoal logs digits w1 -f")
    assert await page.evaluate("window.hit") is None
    # The newest lines are visible.
    bottom = "node => node.scrollHeight - node.scrollTop - node.clientHeight"
    assert await output.evaluate(bottom) < 8

    world.printed["w1"].append("a new line")
    await expect(output).to_contain_text("a new line")
    assert await output.evaluate(bottom) < 8

    earlier = shown.get_by_role("button", name="Earlier lines")
    await earlier.evaluate("button => { button.click(); button.click(); }")
    await expect(output).to_contain_text("line 30\n")
    await earlier.click()
    await expect(output).to_contain_text("line 0\n")
    await expect(earlier).to_be_hidden()
    assert (await output.inner_text()).splitlines() == world.printed["w1"]

    await page.keyboard.press("Escape")
    await expect(shown).to_be_hidden()
    assert await page.evaluate("output.path") == ""


async def test_no_line_is_missing_once_the_dialog_is_full(
    world: World, server: StatusServer, page: Page
) -> None:
    """The page shows as many earlier lines as it has space for; new lines follow the newest one."""
    world.printed["w1"] = [f"line {number}" for number in range(6000)]
    await page.goto(f"{server.url}/?job=digits")
    await page.get_by_role("button", name="w1", exact=True).click()
    shown = page.get_by_role("dialog", name="Member")
    output = shown.get_by_role("log", name="Output of w1")
    await expect(output).to_contain_text("line 5999")
    # As after a hundred requests for earlier lines.
    most = await page.evaluate("MAX_OUTPUT_LINES")
    held = world.printed["w1"][-(most - 20) :]
    start = len(world.printed["w1"]) - len(held)
    await page.evaluate(
        "([lines, before]) => Object.assign(output, { lines, before })", [held, f"ab-{start}"]
    )
    earlier = shown.get_by_role("button", name="Earlier lines")
    await earlier.click()
    await expect(earlier).to_be_hidden()
    world.printed["w1"].append("a new line")
    await expect(output).to_contain_text("a new line")
    assert (await output.inner_text()).splitlines() == world.printed["w1"][-most:]


async def test_one_dialog_shows_the_output_of_all_members(
    world: World, server: StatusServer, page: Page
) -> None:
    """Each line begins with its member's name, and new lines are added as they are printed. Members
    without output are named. The page sends no request once the dialog is closed."""
    world.printed["w0"] = [f"line {number}" for number in range(40)]
    world.printed["w1"] = [HOSTILE]
    await page.goto(f"{server.url}/?job=digits")
    await page.get_by_role("button", name="Output of all members").click()
    shown = page.get_by_role("dialog", name="Output of all members")
    output = shown.get_by_role("log")
    await expect(output).to_contain_text("w0 line 39")
    await expect(output).not_to_contain_text("w0 line 19\n")
    await expect(output).to_contain_text(f"w1 {HOSTILE}")
    await expect(shown.get_by_role("status")).to_have_text("no launcher passes on the output of w2")
    world.printed["w2"] = ["it is there"]
    world.printed["w1"].append("a new line")
    await expect(output).to_contain_text("w2 it is there")
    await expect(output).to_contain_text("w1 a new line")
    await expect(shown.get_by_role("status")).to_have_text("From the launchers of 3 members")
    assert await page.evaluate("window.hit") is None
    await page.keyboard.press("Escape")
    await expect(shown).to_be_hidden()
    assert await page.evaluate("outputs.members.length") == 0


async def test_unavailable_output_is_shown_with_the_reason_and_requested_again(
    world: World, server: StatusServer, page: Page
) -> None:
    await page.goto(f"{server.url}/?job=digits")
    await page.get_by_role("button", name="w1", exact=True).click()
    shown = page.get_by_role("dialog", name="Member")
    status = shown.get_by_role("status")
    await expect(status).to_have_text("no launcher passes on the output of w1; Look there.")
    world.printed["w1"] = ["it is there"]
    await expect(shown.get_by_role("log")).to_have_text("it is there")
    await expect(status).to_have_text("From the launcher on node-0")


async def test_the_last_lines_of_a_lost_member_are_shown(
    world: World, server: StatusServer, page: Page
) -> None:
    """The member's dialog opens by its name in the last generation that had it."""
    before = status_world.generation(2, ["w0", "w1", "w2", "w9"])
    after = status_world.generation(3, ["w0", "w1", "w2"], digest="9a" * 32)
    world.change("digits", generations=(after, before))
    world.printed["w9"], world.launchers_live = ["out of memory"], False
    await page.goto(f"{server.url}/?job=digits")
    roster = page.get_by_role("region", name="Generations")
    await roster.get_by_role("button", name="w9").click()
    shown = page.get_by_role("dialog", name="Member")
    await expect(shown).to_contain_text("This member has left the job.")
    await expect(shown.get_by_role("log")).to_have_text("out of memory")
    await expect(shown.get_by_role("status")).to_contain_text(
        "has ended; these are the last lines that it sent"
    )


@pytest.mark.parametrize("width", [390, 1440])
async def test_long_lines_fit_into_the_page(
    world: World, server: StatusServer, page: Page, width: int
) -> None:
    world.printed["w1"] = ["x" * 5000, "a line"]
    await page.set_viewport_size({"width": width, "height": 800})
    await page.goto(f"{server.url}/?job=digits")
    await page.get_by_role("button", name="w1", exact=True).click()
    output = page.get_by_role("log", name="Output of w1")
    await expect(output).to_contain_text("a line")
    assert await output.evaluate("node => node.scrollWidth - node.clientWidth") <= 1
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
