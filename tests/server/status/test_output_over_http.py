"""Output of members over HTTP: for operators and viewers, one part at a time."""

from pathlib import Path

import httpx
import pytest
from support.clusters.status_world import World

from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.access import tokens
from shoal_server.status.access.guard import Guard
from shoal_server.status.access.tokens import HttpRole, Tokens
from shoal_server.status.app import build_app
from shoal_server.status.serve import StatusServer

PATH = "/api/v1/jobs/digits/members/w1/output"


async def test_lines_are_read_in_parts_by_position(world: World, http: httpx.AsyncClient) -> None:
    world.printed["w1"] = [f"line {number}" for number in range(70)]
    newest = (await http.get(PATH)).json()
    assert (newest["lines"][-1], newest["is_live"], newest["host"]) == ("line 69", True, "node-0")
    before = (await http.get(PATH, params={"before": newest["before"]})).json()
    assert before["lines"] + newest["lines"] == world.printed["w1"]
    world.printed["w1"].append("line 70")
    since = (await http.get(PATH, params={"after": newest["after"]})).json()
    assert since["lines"] == ["line 70"]


async def test_output_without_a_launcher_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get(PATH)
    assert (answer.status_code, answer.json()["kind"]) == (404, "UnknownMember")


@pytest.mark.sampled()
@pytest.mark.parametrize("position", ["", "7", "ab-", "ab-x", "AB-7", "ab-7&x=1", "ab-" + "9" * 17])
async def test_invalid_positions_are_refused(
    world: World, http: httpx.AsyncClient, position: str
) -> None:
    world.printed["w1"] = ["line"]
    answer = await http.get(PATH, params={"after": position})
    assert (answer.status_code, answer.json()["kind"]) == (422, "MalformedMessage")


@pytest.mark.long
async def test_output_needs_a_token_if_the_server_has_tokens(world: World, tmp_path: Path) -> None:
    """Viewers and operators may read it, and count as known callers."""
    world.printed["w1"] = ["line"]
    file = tmp_path / "tokens"
    secrets = [tokens.add(file, role.value, role) for role in HttpRole]
    app = build_app(world, world.board, guard=Guard(Tokens(file)))
    async with (
        StatusServer(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get(PATH)).status_code == 401
        assert world.askers == []
        for secret in secrets:
            headers = {"authorization": f"Bearer {secret}"}
            assert (await http.get(PATH, headers=headers)).json()["lines"] == ["line"]
    assert world.askers == [CallerProof(is_known=True)] * len(HttpRole)


async def test_without_tokens_a_caller_is_unknown(world: World, http: httpx.AsyncClient) -> None:
    world.printed["w1"] = ["line"]
    assert (await http.get(PATH)).status_code == 200
    assert world.askers == [CallerProof()]


@pytest.mark.long
async def test_the_own_user_is_known_without_tokens(world: World) -> None:
    """The user that runs the cluster reads the output of jobs with a secret too."""
    world.printed["w1"] = ["line"]
    app = build_app(world, world.board, guard=Guard(own_user=True))
    async with (
        StatusServer(app, "127.0.0.1", 0, clients="user") as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        assert (await http.get(PATH)).json()["lines"] == ["line"]
    assert world.askers == [CallerProof(is_known=True)]
