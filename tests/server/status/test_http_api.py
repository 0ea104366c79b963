"""The HTTP API, over a real socket."""

import ast
import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter
from support.clusters import status_world
from support.clusters.status_world import World

from shoal_proto.errors import Unavailable
from shoal_proto.health import gauges
from shoal_proto.incarnation import public_id
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.terminal import printable
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status import metrics
from shoal_server.status.access.guard import OPEN
from shoal_server.status.board import MAX_EVENTS
from shoal_server.status.from_core import quarantined_detail
from shoal_server.status.health import EXAMPLE
from shoal_server.status.reading import StatusQueries
from shoal_server.status.views import (
    FIGURES,
    AcceptedLossView,
    LostShardView,
    Readiness,
    ShardsView,
)

HEALTH = "/api/v1/jobs/digits/members/w1/health"
REPORT = {"incarnation": "incarnation-of-w1", "step": 1300, "loss": 0.125, "samples_per_s": 900.5}


def test_views_are_described_without_a_parse_for_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first requests make schemas of all views. While their sources were parsed, the
    coordinator answered nobody."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a source is parsed")

    monkeypatch.setattr(ast, "parse", refused)
    fields = TypeAdapter(ShardsView).json_schema()["properties"]
    assert fields["lost"]["description"].startswith("Shards that no server holds")


def body_of_error(response: httpx.Response, status: int, kind: str) -> dict[str, str]:
    """Check that the body is an error of the API's form, and return it."""
    body: dict[str, str] = response.json()
    assert response.status_code == status, body
    assert set(body) == {"kind", "what", "seen", "expected", "fix"}
    assert body["kind"] == kind
    return body


@pytest.mark.long
async def test_healthz_is_200_while_the_coordinator_is_not_ready(
    world: World, http: httpx.AsyncClient
) -> None:
    """A restart of the coordinator would not bring etcd back."""
    world.ready = Readiness(ready=False, reason="etcd is away")
    assert (await http.get("/healthz")).status_code == 200


@pytest.mark.long
async def test_readyz_is_503_with_the_reason_until_the_coordinator_leads(
    world: World, http: httpx.AsyncClient
) -> None:
    """The answer also has the leader."""
    world.ready = Readiness(ready=False, reason="another leads", leader="10.0.0.9:7700")
    response = await http.get("/readyz")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "reason": "another leads",
        "leader": "10.0.0.9:7700",
    }
    world.ready = status_world.READY
    assert (await http.get("/readyz")).status_code == 200


async def test_jobs_are_listed_in_order_of_names(world: World, http: httpx.AsyncClient) -> None:
    """Each has its phase, the reason for it, and the number of members that train."""
    world.put(status_world.job("abc", phase="collect", reason="waiting for 2 members", members=()))
    abc, digits = (await http.get("/api/v1/jobs")).json()
    assert (abc["job"], abc["phase"], abc["reason"]) == ("abc", "collect", "waiting for 2 members")
    assert (abc["state"], abc["shown_state"]) == ("running", "waiting")
    assert (digits["num_members"], digits["num_training"], digits["step"]) == (3, 3, 1200)


async def test_a_job_has_members_generations_and_samples(
    world: World, http: httpx.AsyncClient
) -> None:
    """Members are in the order of ranks, those without one last; generations are newest first."""
    standby = status_world.member("a-standby")
    trained = [status_world.member(f"w{rank}", rank) for rank in (2, 1, 0)]
    world.change("digits", members=(standby, *trained))
    world.samples_of["digits"] = status_world.samples()
    job = (await http.get("/api/v1/jobs/digits")).json()
    ids = [entry["member"]["member_id"] for entry in job["members"]]
    assert ids == ["w0", "w1", "w2", "a-standby"]
    assert [record["generation"] for record in job["generations"]] == [3, 1]
    assert job["samples"]["repeated_max"] == 96
    assert (await http.get("/api/v1/jobs/digits/members")).json() == job["members"]


async def test_a_generation_has_its_roster_and_conflicts(
    world: World, http: httpx.AsyncClient
) -> None:
    """A conflict has the field, each value, and the members with that value."""
    aborted = status_world.generation(
        4, ["w0", "w4"], verdict="aborted", conflicts=(status_world.conflict(),)
    )
    world.change("digits", generations=(aborted,))
    record = (await http.get("/api/v1/jobs/digits/generations/4")).json()
    assert record["verdict"] == "aborted"
    assert [entry["member_id"] for entry in record["members"]] == ["w0", "w4"]
    assert record["conflicts"] == [{"field": "seed", "values": {"0": ["w0", "w1"], "7": ["w4"]}}]
    assert (await http.get("/api/v1/jobs/digits/generations")).json() == [record]


async def test_why_has_what_a_member_waits_for(world: World, http: httpx.AsyncClient) -> None:
    """The answer has the member's reason, the job's, and the member's last error."""
    waiting = status_world.member("w9", state="waiting", waiting_for="other members")
    world.change("digits", members=(waiting,), phase="collect", reason="1 of 2 members are ready")
    world.board.report("digits", "w9", status_world.health("w9", last_error="peer reset"))
    why = (await http.get("/api/v1/jobs/digits/members/w9/why")).json()
    assert (why["state"], why["waiting_for"]) == ("waiting", "other members")
    assert (why["phase"], why["reason"]) == ("collect", "1 of 2 members are ready")
    assert why["shown_state"] == "waiting"
    assert why["last_error"] == "peer reset"
    assert 39 <= why["waiting_s"] <= 60


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("/api/v1/jobs/nope", "UnknownJob", "one of digits"),
        ("/api/v1/jobs/digits/members/w7", "UnknownMember", "one of w0, w1, w2"),
        ("/api/v1/jobs/digits/members/w7/why", "UnknownMember", "one of w0, w1, w2"),
        ("/api/v1/jobs/digits/generations/2", "UnknownGeneration", "1 to 3"),
        ("/api/v1/jobs/nope/shards", "UnknownJob", "one of digits"),
        ("/api/v1/jobs/nope/events", "UnknownJob", "one of digits"),
        ("/api/v2/jobs", "RefusedError", ""),
    ],
)
async def test_the_answer_for_an_unknown_object_lists_the_known_ones(
    http: httpx.AsyncClient, path: str, kind: str, expected: str
) -> None:
    """The status is 404."""
    body = body_of_error(await http.get(path), 404, kind)
    assert body["expected"] == expected


async def test_a_health_report_is_shown_with_its_member(http: httpx.AsyncClient) -> None:
    """The report's step also counts for the job."""
    assert (await http.post(HEALTH, json=REPORT)).status_code == 204
    entry = (await http.get("/api/v1/jobs/digits/members/w1")).json()
    assert entry["health"]["loss"] == 0.125
    assert entry["health"]["samples_per_s"] == 900.5
    assert entry["losses"] == [[1300, 0.125]]
    assert (await http.get("/api/v1/jobs")).json()[0]["step"] == 1300


async def test_speeds_of_an_old_report_are_not_shown(world: World, http: httpx.AsyncClient) -> None:
    """A member that waits or hangs reports nothing; its last speed would stay for ever. A member
    whose steps take minutes reports seldom."""
    old_s = unix_s() - 100
    for name, step_s in (("w0", 0.1), ("w1", 60.0)):
        report = status_world.health(
            name, received_unix_s=old_s, step_time_s=step_s, samples_per_s=150.0, memory_bytes=7
        )
        world.board.report("digits", name, report)
    series = parse(await http.get("/metrics"))
    speed = "shoal_member_throughput_samples_per_second"
    assert [name for name in series if name.startswith(speed)] == [
        f'{speed}{{job="digits",member="w1"}}'
    ]
    members = (await http.get("/api/v1/jobs/digits/members")).json()
    health = [each["health"] for each in members[:2]]
    assert [each["samples_per_s"] for each in health] == [None, 150.0]
    assert [each["memory_bytes"] for each in health] == [7, 7]


async def test_every_file_that_the_page_names_is_served(http: httpx.AsyncClient) -> None:
    """Scripts and styles of the page's head, and the library that is loaded later, need no
    token."""
    named = re.findall(r'(?:src|href)="(/[^"]+[.](?:js|css))"', (await http.get("/")).text)
    named += re.findall(r'"(/vendor/[^"]+)"', (await http.get("/plot.js")).text)
    assert len(named) > 8
    for path in named:
        answer = await http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith(("text/javascript", "text/css"))
        assert path in OPEN


async def test_the_time_of_a_checkpoint_is_known_if_its_first_report_was_received(
    world: World, http: httpx.AsyncClient
) -> None:
    """A coordinator that takes over may receive the first report of an old checkpoint, which has no
    time."""

    async def course(**figures: object) -> dict[str, object]:
        assert (await http.post(HEALTH, json={**REPORT, "course": figures})).status_code == 204
        shown: dict[str, object] = (await http.get("/api/v1/jobs/digits")).json()["course"]
        return shown

    assert (await course())["writes_checkpoints"] is None
    assert (await course(writes_checkpoints=False))["writes_checkpoints"] is False
    first = await course(writes_checkpoints=True, checkpoint_step=100, checkpoint_bytes=4096)
    assert first["writes_checkpoints"] is True
    assert first["checkpoint_bytes"] == 4096
    assert isinstance(first["checkpoint_unix_s"], float)
    again = await course(checkpoint_step=100)
    assert again["checkpoint_unix_s"] == first["checkpoint_unix_s"]
    world.renew()
    world.put(status_world.job())
    taken_over = await course(checkpoint_step=100)
    assert taken_over["checkpoint_step"] == 100
    assert taken_over["checkpoint_unix_s"] is None
    assert isinstance((await course(checkpoint_step=200))["checkpoint_unix_s"], float)


async def test_a_job_has_its_command_commit_and_hyperparameters(
    world: World, http: httpx.AsyncClient
) -> None:
    """Command line and commit are reported by a member, and kept once it has left."""

    async def detail() -> dict[str, object]:
        answer: dict[str, object] = (await http.get("/api/v1/jobs/digits")).json()
        return answer

    assert (await detail())["run"] is None
    run = {"command": "train.py --lr 0.1 --token ***", "commit": "5f" * 20, "is_modified": True}
    report = {**REPORT, "course": {"run": run}}
    assert (await http.post(HEALTH, json=report)).status_code == 204
    assert (await http.post(HEALTH, json={**REPORT, "course": {}})).status_code == 204
    world.change("digits", members=(), fields={"strategy": "ddp", "schema": "5f"})
    shown = await detail()
    assert (shown["run"], shown["hyperparameters"]) == (run, {"strategy": "ddp"})
    long = {"course": {"run": {"command": "x" * 4001}}}
    refused = await http.post(HEALTH, json={**REPORT, **long})
    assert "at most 4000 characters" in body_of_error(refused, 422, "MalformedMessage")["expected"]


async def test_the_next_report_corrects_the_step(world: World, http: httpx.AsyncClient) -> None:
    """A member's next report replaces a step that was too high, and the job's step follows."""
    for synchronous in (True, False):
        world.change("digits", synchronous=synchronous)
        before = (await http.get("/api/v1/jobs")).json()[0]["step"]
        forged = {**REPORT, "step": 2**53 - 1}
        assert (await http.post(HEALTH, json=forged)).status_code == 204
        assert (await http.post(HEALTH, json={**REPORT, "step": 1201})).status_code == 204
        after = (await http.get("/api/v1/jobs")).json()[0]["step"]
        assert before <= after <= before + 1201


async def test_a_loss_that_is_not_a_number_is_shown(http: httpx.AsyncClient) -> None:
    """The answer is valid JSON: the loss is the string "NaN"."""
    assert (await http.post(HEALTH, json={**REPORT, "loss": "NaN"})).status_code == 204
    response = await http.get("/api/v1/jobs/digits/members/w1")
    entry = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert entry["health"]["loss"] == "NaN"
    assert entry["losses"] == [[1300, "NaN"]]


async def test_a_report_of_another_incarnation_is_refused(http: httpx.AsyncClient) -> None:
    """The answer is 409 with the public ids of both, and the member's health is unchanged."""
    await http.post(HEALTH, json=REPORT)
    late = await http.post(HEALTH, json={**REPORT, "incarnation": "old", "step": 1})
    body = body_of_error(late, 409, "Fenced")
    assert public_id("old") in body["seen"]
    assert public_id("incarnation-of-w1") in body["expected"]
    assert "incarnation-of-w1" not in late.text
    entry = (await http.get("/api/v1/jobs/digits/members/w1")).json()
    assert entry["health"]["step"] == 1300


async def test_a_restarted_member_has_no_health_of_its_earlier_process(
    world: World, http: httpx.AsyncClient
) -> None:
    """The losses of the earlier process are gone as well."""
    await http.post(HEALTH, json=REPORT)
    world.change("digits", members=(status_world.member("w1", 1, public_id="new"),))
    entry = (await http.get("/api/v1/jobs/digits/members/w1")).json()
    assert (entry["health"], entry["losses"]) == (None, [])


async def test_a_report_of_an_unknown_member_is_refused(http: httpx.AsyncClient) -> None:
    """The answer is 404."""
    response = await http.post("/api/v1/jobs/digits/members/w7/health", json=REPORT)
    body_of_error(response, 404, "UnknownMember")


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("change", "seen", "expected"),
    [
        ({"step": -1}, "step = -1", "step: Input should be greater than or equal to 0"),
        ({"step": "many"}, 'step = "many"', "step: Input should be a valid integer"),
        ({"samples_per_s": "NaN"}, 'samples_per_s = "NaN"', "less than or equal to"),
        ({"last_error": "x" * 3000}, "last_error = ", "at most 2000 characters"),
        ({"lose": 1.0}, "lose = 1.0", "lose: no field of that name"),
        ({"step": False}, "step = false", "not true or false"),
        ({"loss": True}, "loss = true", "not true or false"),
    ],
)
async def test_a_report_out_of_range_names_field_value_and_rule(
    http: httpx.AsyncClient, change: dict[str, object], seen: str, expected: str
) -> None:
    """The answer is 422."""
    body = body_of_error(
        await http.post(HEALTH, json={**REPORT, **change}), 422, "MalformedMessage"
    )
    assert seen in body["seen"]
    assert expected in body["expected"]
    assert len(body["seen"]) < 200, "a long value is shortened"


async def test_unknown_figures_of_a_later_protocol_are_ignored(http: httpx.AsyncClient) -> None:
    """The other figures of the report count. A report of the current protocol with unknown figures
    would be refused."""
    course = {"num_steps": 7, "figure_of_a_later_release": 1}
    later = {"figure_of_a_later_release": [1], "course": course}
    report = {**REPORT, **later, "protocol": OWN_PROTOCOLS.newest + 1}
    assert (await http.post(HEALTH, json=report)).status_code == 204
    entry = (await http.get("/api/v1/jobs/digits/members/w1")).json()
    assert entry["health"]["loss"] == REPORT["loss"]


@pytest.mark.sampled()
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 60_000])
async def test_an_invalid_body_is_refused(http: httpx.AsyncClient, content: bytes) -> None:
    """The answer is 422, and the server serves on."""
    response = await http.post(
        HEALTH, content=content, headers={"content-type": "application/json"}
    )
    body_of_error(response, 422, "MalformedMessage")
    assert (await http.post(HEALTH, json=REPORT)).status_code == 204


async def test_the_error_for_a_report_without_incarnation_names_it(http: httpx.AsyncClient) -> None:
    """The incarnation is the only required field."""
    body = body_of_error(await http.post(HEALTH, json={"step": 1}), 422, "MalformedMessage")
    assert body["seen"] == "no incarnation"


async def test_a_body_above_64_kib_is_refused(http: httpx.AsyncClient) -> None:
    """The answer is 413, with a content length and without one, and says what to do."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    whole = await http.post(HEALTH, content=b" " * 1_000_000)
    assert body_of_error(whole, 413, "RefusedError")["fix"] == "Send a smaller body."
    chunked = await http.post(HEALTH, content=pieces())
    body_of_error(chunked, 413, "RefusedError")


async def test_a_wrong_method_is_an_error_of_the_same_form(http: httpx.AsyncClient) -> None:
    """The answer is 405, and has the allowed method."""
    answer = await http.delete("/api/v1/jobs")
    body_of_error(answer, 405, "RefusedError")
    assert answer.headers["allow"] == "GET"


async def test_pages_of_events_have_each_event_once(world: World, http: httpx.AsyncClient) -> None:
    """Each page is requested with the `next_after` of the one before, and events are in order."""
    for i in range(25):
        world.board.event("digits", "member_lost", f"reason {i}", member_id="w1", generation=i)
    reasons, after = [], 0
    while True:
        page = (await http.get(f"/api/v1/jobs/digits/events?after={after}&limit=10")).json()
        if not page["events"]:
            break
        reasons += [event["reason"] for event in page["events"]]
        after = page["next_after"]
    assert reasons == [f"reason {i}" for i in range(25)]
    assert page["next_after"] == after


async def test_only_the_newest_events_are_kept(world: World, http: httpx.AsyncClient) -> None:
    """The number of kept events is 1,000 for each job. A larger limit of a page is refused."""
    for i in range(MAX_EVENTS + 5):
        world.board.event("digits", "member_lost", str(i))
    page = (await http.get(f"/api/v1/jobs/digits/events?limit={MAX_EVENTS}")).json()
    assert [page["events"][0]["reason"], page["events"][-1]["reason"]] == ["5", "1004"]
    refused = await http.get(f"/api/v1/jobs/digits/events?limit={MAX_EVENTS + 1}")
    assert "limit = " in body_of_error(refused, 422, "MalformedMessage")["seen"]


async def test_shards_and_servers_have_their_state(world: World, http: httpx.AsyncClient) -> None:
    """A job without shards has empty lists."""
    assert (await http.get("/api/v1/jobs/digits/shards")).json() == {
        "servers": [],
        "shards": [],
        "skew": 1.0,
        "lost": [],
        "lost_in_words": [],
        "accepted_losses": [],
    }
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    view = (await http.get("/api/v1/jobs/digits/shards")).json()
    assert [server["state"] for server in view["servers"]] == ["serving", "unreachable"]
    assert [shard["created"] for shard in view["shards"]] == [True, False, True, False]


async def test_a_lost_shard_is_shown_in_three_places(world: World, http: httpx.AsyncClient) -> None:
    """The places are the shards, the metrics, and the answer to what a member waits for."""
    sentence = "shard 2 of job digits was lost with every server that had it: at least version 812."
    lost = LostShardView(
        shard_id=2,
        table="",
        version=812,
        lost_unix_s=1.7e9,
        servers=("ps0", "ps1"),
        on_disk="",
        snapshot="",
        told=sentence,
    )
    given_up = AcceptedLossView(
        shard_id=1, version=7, lost_unix_s=1.7e9, accepted_unix_s=1.7e9, by="ann@desk"
    )
    world.shards_of["digits"] = replace(
        status_world.shards(),
        lost=(lost,),
        lost_in_words=(sentence,),
        accepted_losses=(given_up,),
    )
    view = (await http.get("/api/v1/jobs/digits/shards")).json()
    assert [shard["told"] for shard in view["lost"]] == [sentence]
    assert [loss["by"] for loss in view["accepted_losses"]] == ["ann@desk"]
    why = (await http.get("/api/v1/jobs/digits/members/w1/why")).json()
    assert why["lost_shards"] == [sentence]
    assert 'shoal_job_lost_shards{job="digits"} 1.0' in (await http.get("/metrics")).text
    world.shards_error = Unavailable("etcd does not answer")
    why = (await http.get("/api/v1/jobs/digits/members/w1/why")).json()
    assert "etcd does not answer" in why["lost_shards"][0]


async def test_shards_cannot_be_read_while_etcd_is_away(
    world: World, http: httpx.AsyncClient
) -> None:
    """The answer is 503 with the reason; jobs and metrics are still served."""
    world.shards_error = Unavailable("etcd does not answer")
    response = await http.get("/api/v1/jobs/digits/shards")
    assert body_of_error(response, 503, "Unavailable")["what"] == "etcd does not answer"
    assert (await http.get("/api/v1/jobs/digits")).status_code == 200
    assert (await http.get("/metrics")).status_code == 200


@pytest.mark.long
async def test_a_fault_of_the_server_is_an_error_of_the_same_form(
    world: World, http: httpx.AsyncClient
) -> None:
    """The answer is 500 InternalError, and the server serves on."""
    world.shards_error = ZeroDivisionError("a bug")
    body_of_error(await http.get("/api/v1/jobs/digits/shards"), 500, "InternalError")
    assert (await http.get("/healthz")).status_code == 200


async def test_the_schema_describes_every_endpoint(http: httpx.AsyncClient) -> None:
    """Operations have a summary and a description, and each field of a report a sentence."""
    schema = (await http.get("/openapi.json")).json()
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert operation["description"], path
    report = schema["components"]["schemas"]["HealthReport"]
    assert all("description" in field for field in report["properties"].values())
    assert report["examples"][0]["step"] == 1200
    health = schema["components"]["schemas"]["HealthView"]["properties"]
    assert health["loss"]["description"] == report["properties"]["loss"]["description"]
    member = schema["components"]["schemas"]["MemberView"]["properties"]
    assert member["waiting_for"]["description"] == "Description of what the member waits for."


async def test_metrics_agree_with_what_the_api_shows(world: World, http: httpx.AsyncClient) -> None:
    """Coordinator, jobs, members, shards and servers have metrics."""
    world.shards_of["digits"] = status_world.shards()
    world.samples_of["digits"] = status_world.samples()
    world.board.event("digits", "member_lost", "w3 is gone")
    await http.post(HEALTH, json={**REPORT, "loss": "NaN", "memory_bytes": 4096})
    series = parse(await http.get("/metrics"))
    assert series["shoal_coordinator_ready_bool"] == 1
    assert series['shoal_job_phase_bool{job="digits",phase="running"}'] == 1
    assert series['shoal_job_phase_bool{job="digits",phase="collect"}'] == 0
    assert series['shoal_job_members{job="digits",state="training"}'] == 3
    assert series['shoal_job_generation_number{job="digits"}'] == 3
    assert series['shoal_job_progress_steps{job="digits"}'] == 1300
    assert series['shoal_job_events_total{job="digits",kind="member_lost"}'] == 1
    assert series['shoal_job_health_reports_total{job="digits"}'] == 1
    assert series['shoal_job_completed_samples_total{job="digits"}'] == 5000
    assert series['shoal_member_memory_bytes{job="digits",member="w1"}'] == 4096
    assert math.isnan(series['shoal_member_loss_value{job="digits",member="w1"}'])
    assert series['shoal_member_warned_bool{job="digits",member="w1"}'] == 0
    shard = '{job="digits",server="ps1",shard="1"}'
    assert series[f"shoal_shard_updates_total{shard}"] == 813
    assert series[f"shoal_shard_size_bytes{shard}"] == 3_000_000
    assert series[f"shoal_shard_lag_updates{shard}"] == 3
    server = '{job="digits",server="ps1"}'
    assert series[f"shoal_server_unfinished_bytes{server}"] == 3 << 20
    assert series[f"shoal_server_held_bytes{server}"] == 160 << 20
    assert series['shoal_ps_loop_lag_seconds{percentile="99",server="ps1"}'] == 0.25
    assert series['shoal_coordinator_loop_lag_seconds{percentile="100"}'] >= 0.0
    assert series[f"shoal_server_memory_limit_bytes{server}"] == 1 << 30
    assert series[f"shoal_server_refused_by_epoch_pushes_total{server}"] == 7
    assert series['shoal_job_skew_ratio{job="digits"}'] == 1.25
    staleness = "shoal_job_push_staleness_updates"
    assert series[f'{staleness}_bucket{{job="digits",le="0"}}'] == 4 * 300
    assert series[f'{staleness}_bucket{{job="digits",le="+Inf"}}'] == 4 * 811
    assert series[f'{staleness}_sum{{job="digits"}}'] == 4 * (400 + 2 * 111)


async def test_metrics_have_no_control_characters(world: World, http: httpx.AsyncClient) -> None:
    """Workers choose the names of logged values, and operators read the metrics in a terminal."""
    name = "a\x1b]0;owned\x07\u202e\x9b2J\nshoal_job_lost_shards"
    answer = await http.post(HEALTH, json={**REPORT, "course": {"logged": {name: [3, 0.5]}}})
    assert answer.status_code == 204, answer.text
    text = (await http.get("/metrics")).text
    assert [each for each in text if printable(each, lines=True) != each] == []
    shown = r"a\\x1b]0;owned\\x07\\u202e\\x9b2J\\nshoal_job_lost_shards"
    assert f'shoal_job_logged_value{{job="digits",name="{shown}"}} 0.5' in text.splitlines()


async def test_every_figure_of_a_report_is_shown_exported_and_documented(
    http: httpx.AsyncClient,
) -> None:
    """The figures are those of `FIGURES`; some are gauges as well."""
    docs = (Path(__file__).parents[3] / "docs" / "status.md").read_text()
    assert {name for name in FIGURES if f"`{name}`" not in docs} == set()
    assert {name for name in gauges().values() if f"`{name}`" not in docs} == set()
    report = {**EXAMPLE, "incarnation": "incarnation-of-w1"}
    assert set(report) == {"incarnation", *FIGURES}, "the example has all figures"
    assert (await http.post(HEALTH, json=report)).status_code == 204
    shown = (await http.get("/api/v1/jobs/digits/members/w1")).json()["health"]
    assert {name: shown[name] for name in FIGURES} == {name: report[name] for name in FIGURES}
    series = parse(await http.get("/metrics"))
    for figure, name in gauges().items():
        assert series[f'{name}{{job="digits",member="w1"}}'] == report[figure]


async def test_a_silent_server_does_not_lower_the_counts_of_its_job(
    world: World, http: httpx.AsyncClient
) -> None:
    """A lower count would look like a restart."""
    world.shards_of["digits"] = status_world.shards(silent="ps1")
    series = parse(await http.get("/metrics"))
    assert not [name for name in series if name.startswith("shoal_job_push_staleness_updates")]


async def test_an_ended_job_has_no_age_of_its_snapshot(
    world: World, http: httpx.AsyncClient
) -> None:
    """Nobody can take another: the alert on old snapshots would fire until the job is removed."""
    world.board.snapshot_taken("digits", "snapshot 1")
    age = 'shoal_job_snapshot_age_seconds{job="digits"}'
    assert age in parse(await http.get("/metrics"))
    world.change("digits", phase="finished", state="finished")
    assert age not in parse(await http.get("/metrics"))


async def test_the_loop_goes_on_while_the_text_of_metrics_is_made(world: World) -> None:
    """With thousands of members the text takes long, and heartbeats must be answered."""
    members = [status_world.member(f"w{rank}", rank) for rank in range(1000)]
    world.put(status_world.job(members=members))
    rendered = asyncio.ensure_future(
        metrics.render(StatusQueries(world, world.board), metrics.ProcessMeasures())
    )
    num_turns = 0
    while not rendered.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert b"w999" in rendered.result()
    assert num_turns > 20


async def test_a_quarantined_job_has_no_counters_of_its_life(
    world: World, http: httpx.AsyncClient
) -> None:
    """They are not known. As 0 they would rise by the whole life's total after the repair."""
    counters = {
        f'shoal_job_{name}_total{{job="digits"}}' for name in ("restarts", "unproductive_seconds")
    }
    assert counters <= parse(await http.get("/metrics")).keys()
    world.put(quarantined_detail("digits", "a record was refused", unix_s()))
    series = parse(await http.get("/metrics"))
    assert series['shoal_job_phase_bool{job="digits",phase="quarantined"}'] == 1
    assert not counters & series.keys()
    assert 'shoal_job_generation_number{job="digits"}' not in series


async def test_a_removed_job_has_no_metrics(world: World, http: httpx.AsyncClient) -> None:
    """The series of a removed job would be stale."""
    assert any("digits" in name for name in parse(await http.get("/metrics")))
    world.by_name.clear()
    assert not any("digits" in name for name in parse(await http.get("/metrics")))


async def test_metric_names_end_in_their_unit(world: World, http: httpx.AsyncClient) -> None:
    """Labels and the parts of a histogram's name follow it."""
    world.shards_of["digits"] = status_world.shards()
    units = {"bytes", "seconds", "steps", "samples", "members", "bool", "number", "value"}
    units |= {"jobs", "total", "second", "updates", "shards", "ratio", "info"}
    names = {name.split("{")[0] for name in parse(await http.get("/metrics"))}
    # Prometheus adds the names of a histogram's parts after the unit.
    names = {re.sub("_(bucket|count|sum)$", "", name) for name in names}
    assert {name for name in names if name.rsplit("_", 1)[1] not in units} == set()


def parse(response: httpx.Response) -> dict[str, float]:
    """Return the value of each series, by its name with labels."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_a_finished_job_keeps_its_step(world: World, http: httpx.AsyncClient) -> None:
    """The job's step is kept after all its members have left."""
    await http.post(HEALTH, json=REPORT)
    world.change("digits", members=(), phase="finished")
    assert (await http.get("/api/v1/jobs")).json()[0]["step"] == 1300
