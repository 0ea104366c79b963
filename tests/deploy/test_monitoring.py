"""The metrics follow Prometheus' rules, and board and alerts name only served ones."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.clusters import status_world
from support.clusters.status_world import World
from support.processes.served_process import awaited

from shoal.launcher.metrics import LauncherCollector
from shoal.launcher.worker_slots import Exit, WorkerSlot
from shoal_client.liveness.beat_board import MembershipEnding
from shoal_server.core.generations.roster import Generation, Step
from shoal_server.core.membership.changes import ChangeSummary, Departure
from shoal_server.serving.durations import BOUNDS_S, Durations
from shoal_server.serving.process_metrics import histogram
from shoal_server.status.app import build_app
from shoal_server.status.metrics import ProcessMeasures, render
from shoal_server.status.reading import StatusQueries
from shoal_server.status.serve import StatusServer

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
PARTS = re.compile(r"_(bucket|count|sum|total)$")


def known() -> World:
    """A coordinator with a job for which all figures are known."""
    world = World()
    world.put(status_world.job())
    world.shards_of["digits"] = status_world.shards()
    world.samples_of["digits"] = status_world.samples()
    world.published.append(status_world.published())
    world.board.record_generation("digits", story())
    figures = {"generation": 4, "paused_s": 0.06, "lost_steps": 2, "staleness_steps": 1.0}
    figures |= {"step_time_s": 0.01, "samples_per_s": 10.0, "memory_bytes": 1}
    figures |= {"cpu_cores": 1.0, "host_received_bytes_per_s": 1.0, "host_sent_bytes_per_s": 1.0}
    figures |= {"sent_bytes_per_step": 10, "compression_ratio": 2.0}
    world.board.report("digits", "w1", status_world.health("w1", **figures))
    world.board.snapshot_taken("digits", "snapshot 1")
    return world


async def exposed() -> str:
    """The metrics of this coordinator."""
    world = known()
    measures = ProcessMeasures()
    measures.calls.observe(0.002, "Propose", "OK")
    return (await render(StatusQueries(world, world.board), measures)).decode()


def story() -> ChangeSummary:
    return ChangeSummary(
        generation=Generation(4),
        cause="lost w9 (SIGKILL); 3 go on",
        lost=(Departure(member_id="w9", cause="SIGKILL", lost=True),),
        left=(),
        joined=(),
        stayed=("w0", "w1", "w2"),
        synchronous=True,
        start=Step(9),
        steps_lost=0,
        down_s=0.04,
    )


def launched() -> str:
    """The metrics of a launcher, one of whose workers was killed and started again."""
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415

    slots = [WorkerSlot(index=index, member_id=f"w{index}") for index in range(2)]
    slots[0].exits = [
        Exit(code=-9, ending=MembershipEnding.UNKNOWN),
        Exit(code=0, ending=MembershipEnding.UNKNOWN),
    ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LauncherCollector(slots))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_changes_are_counted_from_zero() -> None:
    """A counter that first appears with 1 shows no increase, so counters exist before the first
    event."""
    world = World()
    world.put(status_world.job())
    queries = StatusQueries(world, world.board)
    before = samples((await render(queries, ProcessMeasures())).decode())
    assert before["shoal_job_lost_members_total{job=digits}"] == 0
    assert before["shoal_job_events_total{job=digits,kind=generation_changed}"] == 0
    assert before["shoal_job_recovery_seconds_count{job=digits}"] == 0
    after = samples(await exposed())
    assert after["shoal_job_lost_members_total{job=digits}"] == 1
    assert after["shoal_job_lost_steps_total{job=digits}"] == 2
    assert after["shoal_job_events_total{job=digits,kind=generation_changed}"] == 1
    assert after["shoal_job_recovery_seconds_count{job=digits}"] == 1
    assert after["shoal_job_recovery_seconds_sum{job=digits}"] == pytest.approx(0.06)
    assert after["shoal_job_uncopied_shards{job=digits}"] == 0
    assert after["shoal_coordinator_call_duration_seconds_count{method=Propose,outcome=OK}"] == 1


async def test_summary_and_metric_have_the_same_unproductive_time() -> None:
    """No generation ran for 9.98 s, and members paused for 0.02 s longer than one of the changes
    took."""
    world = known()
    world.change("digits", begun_unix_s=1.0, ended_unix_s=101.0, unproductive_s=9.98)
    queries = StatusQueries(world, world.board)
    summary = queries.summary(queries.job("digits"))
    assert summary.unproductive_s == pytest.approx(10.0)
    assert summary.goodput == pytest.approx(0.9)
    shown = samples((await render(queries, ProcessMeasures())).decode())
    assert shown["shoal_job_unproductive_seconds_total{job=digits}"] == pytest.approx(10.0)


def test_a_launcher_counts_exits_of_workers_by_cause() -> None:
    found = samples(launched())
    assert found["shoal_launcher_worker_exits_total{cause=SIGKILL}"] == 1
    assert found["shoal_launcher_worker_exits_total{cause=completed}"] == 1
    assert found["shoal_launcher_worker_restarts_total{}"] == 1


def test_a_pending_restart_is_not_counted() -> None:
    waits = WorkerSlot(index=0, member_id="w0", start_at_s=1.0)
    waits.exits = [Exit(code=1, ending=MembershipEnding.PASSING)]
    families = LauncherCollector([waits]).collect()
    (restarts,) = (each for each in families if each.name == "shoal_launcher_worker_restarts")
    assert [each.value for each in restarts.samples] == [0]


def test_a_histogram_counts_durations_up_to_each_bound() -> None:
    durations = Durations(("what",))
    for seconds in (0.0005, 0.02, 1000.0):
        durations.observe(seconds, "x")
    family = histogram("shoal_test_seconds", "A test.", durations)
    counts = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert len(counts) == len(BOUNDS_S) + 1
    assert (counts["0.0005"], counts["0.01"], counts["0.025"], counts["+Inf"]) == (1, 1, 2, 3)


async def test_names_and_types_follow_the_conventions() -> None:
    """The rules of `promtool check metrics` hold: help for all, `_total` only for counters, base
    units, and no label with a meaning in Prometheus."""
    for family in text_string_to_metric_families(await exposed() + launched()):
        name = family.name
        assert name.startswith("shoal_") and name.islower(), name
        assert family.documentation.endswith("."), name
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names <= {f"{name}_total"}, names
        else:
            assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        assert not re.search(r"_(ms|millis|milliseconds|minutes|kb|mb|percent)(_|$)", name), name
        for sample in family.samples:
            assert "quantile" not in sample.labels, name
            assert "le" not in sample.labels or family.type == "histogram", name


def named_in(text: str) -> Iterator[str]:
    yield from re.findall(r"\bshoal_[a-z0-9_]+", text)


async def test_board_and_alerts_name_metrics_that_are_served() -> None:
    """Alerts each have a section in the runbook."""
    text = await exposed() + launched()
    served = {PARTS.sub("", name) for name in named_in(text)}
    served |= {"shoal_ps_push_duration_seconds", "shoal_ps_call_duration_seconds"}
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    board = json.loads((MONITORING / "grafana.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    named = {PARTS.sub("", name) for each in expressions for name in named_in(each)}
    assert named <= served, named - served
    runbook = (ROOT / "docs" / "runbook-alerts.md").read_text()
    sections = set(re.findall(r"^## (\w+)$", runbook, re.MULTILINE))
    assert {rule["alert"] for rule in rules} == sections
    for rule in rules:
        anchor = f"docs/runbook-alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == anchor


def test_moments_without_a_generation_do_not_end_the_alert_on_goodput() -> None:
    """A job that breaks again and again has such moments within each ten minutes: a condition on
    the present phase would start the rule's `for` anew each time."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    (rule,) = (each for each in rules if each["alert"] == "ShoalLowGoodput")
    assert rule["for"] == "10m"
    assert all(
        part.startswith("[") for part in re.findall(r"\bshoal_\w+(?:{.*?})?(.)", rule["expr"])
    )


def test_no_rule_mixes_clusters() -> None:
    """One Prometheus may watch several clusters, with jobs of the same name."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert not re.search(r"\b(max|min|sum|count|avg)\(", rule["expr"]), rule["alert"]
        for labels in re.findall(r"\b(?:by|on) \((.*?)\)", rule["expr"]):
            assert {"cluster", "namespace"} <= set(labels.split(", ")), rule["alert"]


@pytest.mark.nightly
async def test_promtool_accepts_metrics_rules_and_configuration(tmp_path: Path) -> None:
    """The test needs promtool; on Debian: apt-get install prometheus."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.fail("no promtool on PATH; on Debian: apt-get install prometheus")

    def check(*arguments: str, text: str = "") -> None:
        done = subprocess.run(
            [promtool, "check", *arguments], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "shoal" not in done.stderr, done.stderr

    check("metrics", text=await exposed())
    check("metrics", text=launched())
    check("rules", str(MONITORING / "alerts.yml"))
    check("config", "--syntax-only", str(MONITORING / "prometheus.yml"))


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """A real Prometheus with the shipped configuration, for a coordinator at `target`."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail("no prometheus on PATH; on Debian: apt-get install prometheus")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "alerts.yml")]
    for each in config["scrape_configs"]:
        each["static_configs"] = [{"targets": [target] if each["job_name"] == "shoal" else []}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    options = [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={own}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", *options], stderr=log
        ) as process,
        httpx.Client(base_url=f"http://{own}/api/v1", trust_env=False) as http,
    ):
        try:
            yield http
        finally:
            process.terminate()


def answer(http: httpx.Client, path: str, kind: str, **query: str) -> list[Any]:
    """Data of Prometheus' answer, once there are any."""

    def asked() -> list[Any] | None:
        try:
            reply = http.get(path, params=query)
        except httpx.ConnectError:
            return None
        if reply.status_code == 503:  # it is starting
            return None
        assert reply.status_code == 200, reply.text
        found: list[Any] = reply.json()["data"][kind]
        return found

    return awaited(asked, 60.0, f"{path} {query}")


@pytest.mark.nightly
async def test_a_real_prometheus_scrapes_and_evaluates(tmp_path: Path) -> None:
    """The label `job` is the training job; each alert and each panel of the board is evaluated."""
    world = known()
    app = build_app(world, world.board)
    async with StatusServer(app, "127.0.0.1", 0) as server:
        await asyncio.to_thread(_look_at, tmp_path, server.url.removeprefix("http://"))


def _look_at(folder: Path, target: str) -> None:
    with prometheus(folder, target) as http:
        training = 'shoal_job_members{state="training"}'
        [members] = answer(http, "query", "result", query=training)
        assert members["metric"]["job"] == "digits" and "exported_job" not in members["metric"]
        [up] = answer(http, "query", "result", query="up")
        assert up["value"][1] == "1"
        board = json.loads((MONITORING / "grafana.json").read_text())
        for panel in board["panels"]:
            for each in panel["targets"]:
                expression = re.sub(r"\$__rate_interval|\$__range", "1m", each["expr"])
                expression = re.sub(r"\$\w+", ".*", expression)
                reply = http.get("query", params={"query": expression})
                assert reply.json()["status"] == "success", reply.text

        def evaluated() -> bool:
            [group] = answer(http, "rules", "groups")
            return all(rule["health"] == "ok" for rule in group["rules"])

        awaited(evaluated, 60.0, "all rules evaluated")
