"""Charts of the page in a real browser: values, ranges, scales, files, and two jobs in one
chart."""

import csv
import math
import time
from io import BytesIO, StringIO

import pytest
from PIL import Image
from playwright.async_api import Locator, Page, expect
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_proto.health import CourseFigures
from shoal_server.status.history.records import ChangeView
from shoal_server.status.history.series import Reading, Series
from shoal_server.status.serve import StatusServer

pytestmark = pytest.mark.browser

expect.set_options(timeout=30_000)

SLOW_FIRST_STEP_S = 0.146


def trained(world: World, job: str, num_seconds: int, every_s: int = 1) -> None:
    """Give a job a history with a slow first step, and with a lost member halfway."""
    series, begun_s = Series(), time.time() - num_seconds
    for second in range(0, num_seconds, every_s):
        reading = Reading(
            generation=3 if second < num_seconds // 2 else 4,
            step=10 * second,
            losses=(2.0 * math.exp(-second / 60) + 0.01,),
            samples_per_s=(900.0,),
            step_s=dict.fromkeys(range(3), 0.004 if second else SLOW_FIRST_STEP_S),
        )
        series.add(reading, begun_s + second)
    change = ChangeView(
        generation=4,
        unix_s=begun_s + num_seconds // 2,
        cause="lost w9",
        line="generation 4: lost w9 (SIGKILL); 3 go on",
        num_members=3,
        lost=("w9",),
    )
    world.board.restore_history(job, series.view(), (change,), 0.0)


def figure(page: Page, title: str) -> Locator:
    return page.locator("figure.chart").filter(has=page.get_by_text(title, exact=True))


async def scale_of(page: Page, title: str) -> list[float]:
    """Return the lowest and the highest value of a chart's scale."""
    drawn = "(title) => [...plots.values()].find((p) => p.chart.title === title).u.scales.y"
    scale = await page.evaluate(drawn, title)
    return [scale["min"], scale["max"]]


async def test_values_are_read_by_keyboard(world: World, server: StatusServer, page: Page) -> None:
    """Arrow keys move by one value; step, value and changes of generations are shown as text."""
    trained(world, "digits", 120)
    await page.goto(f"{server.url}/?job=digits")
    loss = page.get_by_role("slider", name="Loss from")
    readout = figure(page, "Loss").locator(".readout")
    await expect(readout).to_contain_text("to 2.01")
    await loss.focus()
    await page.keyboard.press("Home")
    await expect(readout).to_contain_text("step 02.01")
    await page.keyboard.press("ArrowRight")
    await expect(readout).to_contain_text("step 101.977")
    assert "1.977" in str(await loss.get_attribute("aria-valuetext"))
    for _ in range(6):
        await page.keyboard.press("PageDown")
    await page.keyboard.press("ArrowLeft")
    await expect(readout).to_contain_text("generation 4: lost w9 (SIGKILL); 3 go on")
    await page.keyboard.press("End")
    await expect(readout).to_contain_text("step 1,190")
    await page.keyboard.press("Escape")
    await expect(readout).to_contain_text("to 2.01")


async def test_the_pointer_shows_values_of_one_step_in_all_charts(
    world: World, server: StatusServer, page: Page
) -> None:
    trained(world, "digits", 120)
    await page.goto(f"{server.url}/?job=digits")
    over = figure(page, "Loss").locator(".u-over")
    await over.hover(position={"x": 40, "y": 20})
    step = str(await figure(page, "Loss").locator(".readout b").text_content())
    assert ", step " in step
    await expect(figure(page, "Samples per second").locator(".readout")).to_contain_text(step)
    await expect(figure(page, "Samples per second").locator(".readout")).to_contain_text("900")


async def test_the_first_step_does_not_flatten_the_step_times(
    world: World, server: StatusServer, page: Page
) -> None:
    """The other steps determine the scale; the first one's time can still be read."""
    trained(world, "digits", 120)
    await page.goto(f"{server.url}/?job=digits")
    times = page.get_by_role("slider", name="Step time from 146 ms")
    await times.focus()
    assert (await scale_of(page, "Step time"))[1] < 0.005
    await page.keyboard.press("Home")
    await expect(figure(page, "Step time").locator(".readout")).to_contain_text("146 ms")


async def test_the_loss_has_a_logarithmic_scale_that_can_be_turned_off(
    world: World, server: StatusServer, page: Page
) -> None:
    trained(world, "digits", 120)
    await page.goto(f"{server.url}/?job=digits")
    button = figure(page, "Loss").get_by_role("button", name="log")
    await expect(button).to_have_attribute("aria-pressed", "true")
    assert await page.evaluate("[...plots.values()][0].u.scales.y.distr") == 3
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "false")
    assert await page.evaluate("[...plots.values()][0].u.scales.y.distr") == 1
    await expect(
        figure(page, "Samples per second").get_by_role("button", name="log")
    ).to_be_hidden()


async def test_a_range_shows_the_newest_part(
    world: World, server: StatusServer, page: Page
) -> None:
    """The range applies to charts over time and to charts over steps."""
    trained(world, "digits", 3600, every_s=20)
    for step in range(0, 36_000, 600):
        report = status_world.health("w0", course=CourseFigures(logged={"accuracy": (step, 0.5)}))
        world.board.report("digits", "w0", report)
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.get_by_role("slider", name="over 60 min")).not_to_have_count(0)
    await page.get_by_role("button", name="15 min").click()
    await expect(page.get_by_role("slider", name="over 15 min")).not_to_have_count(0)
    await expect(page.get_by_role("slider", name="over 60 min")).to_have_count(0)
    first = (
        "[...plots.values()].find((p) => p.chart.title === 'accuracy').chart.lines[0].rows[0][0]"
    )
    assert 26_000 < await page.evaluate(first) < 28_000


async def test_a_range_of_a_long_job_has_more_values_for_its_time(
    world: World, server: StatusServer, page: Page
) -> None:
    """The last 15 minutes of six hours have over a hundred values. "All" shows the six hours
    again."""
    world.board.restore_history("digits", Series().view(), (), 0.0)
    known = world.board.history("digits")
    assert known is not None
    begun_s = time.time() - 21_600
    for second in range(0, 21_600, 8):
        known[1].add(Reading(generation=3, step=second, losses=(1.0,)), begun_s + second)
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.get_by_role("slider", name="Loss from 1 to 1 over 6 h")).to_have_count(1)
    await page.get_by_role("button", name="15 min").click()
    await expect(page.get_by_role("slider", name="Loss from 1 to 1 over 15 min")).to_have_count(1)
    rows = "[...plots.values()].find((p) => p.chart.title === 'Loss').chart.lines[0].rows.length"
    await page.wait_for_function(f"{rows} > 100")
    await page.get_by_role("button", name="All", exact=True).click()
    await expect(page.get_by_role("slider", name="Loss from 1 to 1 over 6 h")).to_have_count(1)


async def test_a_chart_is_saved_as_csv_and_as_png(
    world: World, server: StatusServer, page: Page
) -> None:
    """The CSV file has all shown values with their steps; a name cannot become a formula."""
    trained(world, "digits", 120)
    for step in range(3):
        report = status_world.health("w0", course=CourseFigures(logged={"=1+1": (step, 0.5)}))
        world.board.report("digits", "w0", report)
    await page.goto(f"{server.url}/?job=digits")
    async with page.expect_download() as saving:
        await figure(page, "Loss").get_by_role("button", name="CSV").click()
    saved = await saving.value
    assert saved.suggested_filename == "digits-Loss.csv"
    rows = list(csv.DictReader(StringIO((await saved.path()).read_text())))
    assert len(rows) == 120
    assert [(row["step"], row["Loss"]) for row in rows[:2]] == [("0", "2.01"), ("10", "1.9769")]
    async with page.expect_download() as saving:
        await figure(page, "=1+1").get_by_role("button", name="CSV").click()
    assert (await (await saving.value).path()).read_text().startswith("step,'=1+1\n")
    async with page.expect_download() as saving:
        await figure(page, "Loss").get_by_role("button", name="PNG").click()
    picture = Image.open(BytesIO((await (await saving.value).path()).read_bytes()))
    assert picture.format == "PNG"
    assert picture.width > 200
    assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


async def test_two_jobs_are_compared_over_steps(
    world: World, server: StatusServer, page: Page
) -> None:
    """The chart has both lines, and shows the values of both at one step."""
    world.put(status_world.job("other"))
    trained(world, "digits", 120)
    trained(world, "other", 60)
    await page.goto(f"{server.url}/?job=digits")
    await expect(page.locator("#compare option")).to_have_count(2)
    await page.get_by_label("Compare with").select_option("other")
    loss = page.get_by_role("slider", name="Loss from 2.01 to 0.2852 to step 1,190")
    await loss.focus()
    await page.keyboard.press("Home")
    readout = figure(page, "Loss").locator(".readout")
    await expect(readout).to_contain_text("digits 2.01")
    await expect(readout).to_contain_text("other 2.01")
    await page.get_by_label("Compare with").select_option("no other job")
    await expect(page.get_by_role("slider", name="Loss from").first).to_have_accessible_name(
        "Loss from 2.01 to 0.2852 over 2 min, between 0.2852 and 2.01"
    )
