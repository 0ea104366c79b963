"""Access over HTTP, by token and by session: which callers may read and act, and what is logged."""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from support.clusters.status_world import World

from shoal_client.certificates.folder import CertificateFolder
from shoal_proto.errors import InvalidSpec, StateLost, UnknownJob
from shoal_proto.tls import identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import Caller, CertificateRole
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.access import tokens
from shoal_server.status.access.guard import OPEN, REPORT, Guard, session_of
from shoal_server.status.access.sessions import VALID_S, Sessions, cookie, cookie_name
from shoal_server.status.access.tokens import HttpRole, Tokens
from shoal_server.status.app import build_app
from shoal_server.status.http import server as http_server
from shoal_server.status.http.protocol import CALLER
from shoal_server.status.serve import StatusServer
from shoal_server.token_command import TokenConfig, token

WITHIN_S = 30.0
REPORT_BODY = {"incarnation": "incarnation-of-w1", "step": 1}


@dataclass
class RecordedCalls:
    """Operations that only record their calls."""

    calls: list[tuple[str, ...]] = field(default_factory=list)

    async def stop(self, job: str, reason: str, who: CallerProof) -> None:
        if job != "digits":
            raise UnknownJob(f"there is no job {job}")
        self.calls.append(("stop", job, reason))

    async def retry(self, job: str, who: CallerProof) -> None:
        self.calls.append(("retry", job))

    async def snapshot(self, job: str, who: CallerProof) -> None:
        if job == "lost":
            raise StateLost("shard 0 of job lost was lost with every server that had it")
        self.calls.append(("snapshot", job))

    async def drain(self, job: str, member_id: str, reason: str, who: CallerProof) -> None:
        self.calls.append(("drain", job, member_id, reason))


@dataclass
class Served:
    server: StatusServer
    app: FastAPI
    http: httpx.AsyncClient
    recorded: RecordedCalls
    file: Path
    viewer: dict[str, str]
    operator: dict[str, str]


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def serving(world: World, folder: Path) -> AsyncIterator[Served]:
    file, recorded = folder / "tokens", RecordedCalls()
    viewer = tokens.add(file, "ann", HttpRole.VIEWER)
    operator = tokens.add(file, "bob", HttpRole.OPERATOR)
    app = build_app(world, world.board, guard=Guard(Tokens(file)), operations=recorded)
    async with (
        StatusServer(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
    ):
        yield Served(server, app, http, recorded, file, bearer(viewer), bearer(operator))


def filled(path: str) -> str:
    return path.format(job="digits", member="w1", generation=1)


@pytest.mark.long
async def test_every_call_of_the_api_needs_its_role(world: World, tmp_path: Path) -> None:
    """Viewers may read, and operators may act; a caller without a token may do neither, except for
    the calls in `OPEN` and reports. The calls are those of the API's schema."""
    world.printed["w1"] = ["a line"]
    async with serving(world, tmp_path) as served:
        seen: dict[str, tuple[int, int, int]] = {}
        for path, methods in served.app.openapi()["paths"].items():
            for method in methods:
                call = f"{method.upper()} {path}"
                body = {"token": "x"} if path.endswith("/session") else {}
                statuses = []
                for who in ({}, served.viewer, served.operator):
                    content = body if method == "post" else None
                    request = served.http.build_request(
                        method, filled(path), json=content, headers=who
                    )
                    response = await served.http.send(request, stream=True)
                    statuses.append(response.status_code)
                    await response.aclose()
                seen[call] = (statuses[0], statuses[1], statuses[2])
        acts = [call for call in seen if not call.startswith("GET")]
        for call, (stranger, viewer, operator) in seen.items():
            path = filled(call.partition(" ")[2])
            if path in OPEN or REPORT.fullmatch(path):
                assert 401 not in (viewer, operator) or path == "/api/v1/session", call
                continue
            assert stranger == 401, call
            assert viewer == (403 if call in acts else 200), call
            assert operator in (200, 204, 422), call
        assert len(seen) > 15 and len(acts) >= 6
        # Calls refused to a viewer had no effect.
        assert sorted(call[0] for call in served.recorded.calls) == [
            *("drain", "retry", "snapshot", "stop"),
        ]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer x", "Basic YTpi", "bearer  x y", "Bearer " + "x" * 5000],
)
async def test_an_invalid_token_is_refused(world: World, tmp_path: Path, value: str) -> None:
    async with serving(world, tmp_path) as served:
        answer = await served.http.get("/api/v1/jobs", headers={"authorization": value})
        assert (answer.status_code, answer.json()["kind"]) == (401, "AccessDenied")
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.long
async def test_workers_report_without_a_token(world: World, tmp_path: Path) -> None:
    """Workers show their process' incarnation. Health probes need no token either."""
    async with serving(world, tmp_path) as served:
        path = "/api/v1/jobs/digits/members/w1/health"
        assert (await served.http.post(path, json=REPORT_BODY)).status_code == 204
        assert (await served.http.get("/healthz")).status_code == 200


@pytest.mark.long
async def test_a_refused_report_names_nothing_to_a_stranger(world: World, tmp_path: Path) -> None:
    """The names of jobs and members and the processes' public ids are for callers with a token."""
    async with serving(world, tmp_path) as served:
        http, forged = served.http, {**REPORT_BODY, "incarnation": "guess"}
        calls = {
            f"/api/v1/jobs/{process}/health": kind
            for process, kind in (
                ("unknown/members/w1", "UnknownJob"),
                ("digits/members/unknown", "UnknownMember"),
                ("digits/members/w1", "Fenced"),
            )
        }
        refusals = [await http.post(path, json=forged) for path in calls]
        assert {each.status_code for each in refusals} == {404}
        assert len({each.text for each in refusals}) == 1 and "w0" not in refusals[0].text
        for path, kind in calls.items():
            told = await http.post(path, json=forged, headers=served.viewer)
            assert told.json()["kind"] == kind


@pytest.mark.long
async def test_a_session_of_the_page_ends_when_it_is_deleted(world: World, tmp_path: Path) -> None:
    """The session is a cookie that is not given to scripts or other sites."""
    async with serving(world, tmp_path) as served:
        http, secret = served.http, served.operator["authorization"].partition(" ")[2]
        assert (await http.get("/api/v1/session")).json() == {
            "name": "",
            "role": "",
            "asks_for_token": True,
            "may_act": False,
        }
        refused = await http.post("/api/v1/session", json={"token": "x"})
        assert refused.status_code == 401 and "set-cookie" not in refused.headers
        begun = await http.post("/api/v1/session", json={"token": secret})
        assert begun.status_code == 204
        attributes = begun.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
        assert secret not in begun.headers["set-cookie"]
        assert (await http.get("/api/v1/session")).json()["name"] == "bob"
        assert (await http.post("/api/v1/jobs/digits/retry")).status_code == 204
        name = cookie_name(http.base_url.netloc.decode())
        stolen = http.cookies[name]
        assert (await http.delete("/api/v1/session")).status_code == 204
        http.cookies.clear()
        again = await http.get("/api/v1/jobs", headers={"cookie": f"{name}={stolen}"})
        assert again.status_code == 401


@pytest.mark.long
async def test_a_call_from_a_page_of_another_site_is_refused(world: World, tmp_path: Path) -> None:
    """The call is refused even with the session's cookie, and by a server without tokens as
    well."""
    async with serving(world, tmp_path) as served:
        login = {"token": served.operator["authorization"].partition(" ")[2]}
        await served.http.post("/api/v1/session", json=login)
        for origin, status in (
            ("http://evil.example", 403),
            ("null", 403),
            ("http://[", 403),  # not a URL
            (served.server.url, 204),
        ):
            answer = await served.http.post(
                "/api/v1/jobs/digits/stop", json={}, headers={"origin": origin}
            )
            assert answer.status_code == status, origin
    recorded = RecordedCalls()
    app = build_app(world, world.board, operations=recorded)
    async with (
        StatusServer(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(trust_env=False) as http,
    ):
        url = f"{server.url}/api/v1/jobs/digits/stop"
        refused = await http.post(url, json={}, headers={"origin": "http://evil.example"})
        assert (refused.status_code, recorded.calls) == (403, [])
        assert (await http.post(url, json={"reason": "late"})).status_code == 204
        assert recorded.calls == [("stop", "digits", "late")]


async def test_an_actions_reason_is_optional(world: World, tmp_path: Path) -> None:
    """A body that is not sent as JSON is refused with the header that it needs."""
    drain, stop = "/api/v1/jobs/digits/members/w1/drain", "/api/v1/jobs/digits/stop"
    async with serving(world, tmp_path) as served:
        for path in (drain, stop):
            answer = await served.http.post(path, headers=served.operator)
            assert answer.status_code == 204, answer.text
        assert served.recorded.calls == [("drain", "digits", "w1", ""), ("stop", "digits", "")]
        form = {**served.operator, "content-type": "application/x-www-form-urlencoded"}
        refused = await served.http.post(stop, content=b'{"reason": "late"}', headers=form)
        assert refused.status_code == 422
        assert refused.json()["expected"] == "the header content-type: application/json"
        assert len(served.recorded.calls) == 2


async def test_callers_without_a_token_do_not_fill_the_log(world: World, tmp_path: Path) -> None:
    """Lines on holders of tokens are not limited."""
    stop = "/api/v1/jobs/digits/stop"
    async with serving(world, tmp_path) as served:
        with structlog.testing.capture_logs() as logs:
            for who in ({}, {}, {}, served.viewer, served.viewer):
                await served.http.post(stop, json={}, headers=who)
    calls = [line for line in logs if line["event"] == "operator_call"]
    assert [line["by"] for line in calls] == ["", "ann", "ann"]


@pytest.mark.long
async def test_actions_are_logged_with_their_caller(world: World, tmp_path: Path) -> None:
    """Refused actions are logged as well; reads are not, and tokens never are."""
    async with serving(world, tmp_path) as served:
        with structlog.testing.capture_logs() as logs:
            await served.http.get("/api/v1/jobs", headers=served.viewer)
            stop = "/api/v1/jobs/digits/stop"
            for who in ({}, served.viewer, served.operator):
                await served.http.post(stop, json={"reason": "r"}, headers=who)
            await served.http.post("/api/v1/jobs/nope/stop", json={}, headers=served.operator)
        calls = [line for line in logs if line["event"] == "operator_call"]
        logged = [(line["by"], line["role"], line["job"], line["outcome"]) for line in calls]
        assert logged == [
            ("", "", "digits", 401),
            ("ann", "viewer", "digits", 403),
            ("bob", "operator", "digits", 204),
            ("bob", "operator", "nope", 404),
        ]
        assert {line["peer"] for line in calls} == {"127.0.0.1"}
        assert not [line for line in logs if tokens.PREFIX in str(line)]


@pytest.mark.long
async def test_a_token_removed_from_the_file_is_refused(world: World, tmp_path: Path) -> None:
    """The token's sessions end as well, without a restart. An invalid file refuses all tokens."""
    async with serving(world, tmp_path) as served:
        login = {"token": served.viewer["authorization"].partition(" ")[2]}
        await served.http.post("/api/v1/session", json=login)
        assert (await served.http.get("/api/v1/jobs")).status_code == 200
        lines = served.file.read_text().splitlines(keepends=True)
        served.file.write_text("".join(line for line in lines if not line.startswith("ann ")))
        assert (await served.http.get("/api/v1/jobs")).status_code == 401
        assert (await served.http.get("/api/v1/jobs", headers=served.viewer)).status_code == 401
        assert (await served.http.get("/api/v1/jobs", headers=served.operator)).status_code == 200
        served.file.write_text("what is this\n")
        spoilt = await served.http.get("/api/v1/jobs", headers=served.operator)
        assert (spoilt.status_code, spoilt.json()["kind"]) == (503, "AccessDenied")


@pytest.mark.long
async def test_a_live_page_ends_with_its_token_and_its_session(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_server.status.page.TICK_S", 0.01)
    async with serving(world, tmp_path) as served, asyncio.timeout(WITHIN_S):
        login = {"token": served.operator["authorization"].partition(" ")[2]}
        begun = await served.http.post("/api/v1/session", json=login)
        session = {"cookie": begun.headers["set-cookie"].partition(";")[0]}
        served.http.cookies.clear()

        async def logs_out() -> None:
            assert (await served.http.delete("/api/v1/session", headers=session)).is_success

        async def removes_token() -> None:
            lines = served.file.read_text().splitlines(keepends=True)
            served.file.write_text("".join(line for line in lines if not line.startswith("ann ")))

        for who, ends in ((session, logs_out), (served.viewer, removes_token)):
            async with served.http.stream("GET", "/api/v1/stream", headers=who) as live:
                lines = live.aiter_lines()
                assert await anext(lines) == "event: state"
                await ends()
                async for _ in lines:
                    pass
            assert (await served.http.get("/api/v1/jobs", headers=who)).status_code == 401


@pytest.mark.long
async def test_a_lost_job_is_a_conflict_and_no_fault_of_the_server(
    world: World, tmp_path: Path
) -> None:
    async with serving(world, tmp_path) as served:
        path = "/api/v1/jobs/lost/snapshot"
        answer = await served.http.post(path, headers=served.operator)
        assert (answer.status_code, answer.json()["kind"]) == (409, "StateLost")
        described = served.app.openapi()["paths"]["/api/v1/jobs/{job}/snapshot"]["post"]
        assert "409" in described["responses"]


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("takes_tokens", [False, True])
async def test_only_the_servers_own_user_needs_no_token(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_tokens: bool
) -> None:
    """The kernel reports the user of a connection; root is accepted as well. A connection of
    another or unknown user needs a token, if the server has tokens."""
    secret = tokens.add(tmp_path / "tokens", "bob", HttpRole.OPERATOR)
    known = Tokens(tmp_path / "tokens") if takes_tokens else None
    recorded = RecordedCalls()
    app = build_app(world, world.board, guard=Guard(known, own_user=True), operations=recorded)
    async with StatusServer(app, "127.0.0.1", 0, clients="user") as server:

        async def calls(token: str = "") -> tuple[int, int, bool]:
            headers = bearer(token) if token else {}
            # Each caller has a connection of its own, by which the server knows it.
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
                read = await http.get("/api/v1/jobs", headers=headers)
                act = await http.post("/api/v1/jobs/digits/stop", json={}, headers=headers)
                who = (await http.get("/api/v1/session", headers=headers)).json()
            return read.status_code, act.status_code, who["asks_for_token"]

        assert await calls() == (200, 204, False)
        for user in (os.geteuid() + 1, None):
            monkeypatch.setattr(http_server, "user_of_peer", lambda connected, user=user: user)
            assert await calls() == (401, 401, True)
            assert await calls(secret) == ((200, 204, True) if takes_tokens else (401, 401, True))
        monkeypatch.setattr(http_server, "user_of_peer", lambda connected: 0)
        assert await calls() == (200, 204, False)


async def test_callers_from_other_machines_only_report(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page for this machine's user has a second address for members on others: it admits no
    caller without a certificate, and answers reports and probes only."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    monkeypatch.setattr(http_server, "user_of_peer", lambda connected: None)
    app = build_app(world, world.board, guard=Guard(own_user=True))
    files = in_folder(folder.path, CertificateRole.COORDINATOR)
    with identity.using(files):
        async with StatusServer(
            app, "127.0.0.1", 0, clients="user", certified_host="127.0.0.1"
        ) as server:
            assert server.url == f"http://127.0.0.1:{server.port}"
            url = f"https://127.0.0.1:{server.certified_port}"
            context = ssl.create_default_context(cafile=files.ca)
            context.check_hostname = False
            async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/healthz")
            worker = in_folder(folder.path, CertificateRole.WORKER)
            context.load_cert_chain(worker.cert, worker.key)
            async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False) as http:
                report = "/api/v1/jobs/digits/members/w1/health"
                assert (await http.post(report, json=REPORT_BODY)).status_code == 204
                assert (await http.get("/healthz")).status_code == 200
                assert (await http.get("/api/v1/jobs")).status_code == 401


@pytest.mark.parametrize(
    ("caller", "read"),
    [
        (None, []),
        (Caller(CertificateRole.READER, "engine"), []),
        (Caller(CertificateRole.READER, "engine", series="digits/policy"), []),
        (Caller(CertificateRole.WORKER, "w", "digits"), ["/api/v1/jobs/digits"]),
        (Caller(CertificateRole.WORKER, "w", "other"), []),
        (Caller(CertificateRole.WORKER, "w"), ["/api/v1/jobs/digits", "/api/v1/jobs", "/metrics"]),
        (Caller(CertificateRole.VIEWER, "v"), ["/api/v1/jobs/digits", "/api/v1/jobs", "/metrics"]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("world")
async def test_over_tls_without_tokens_the_certificates_role_decides(
    shown: tuple[World, FastAPI], tmp_path: Path, caller: Caller | None, read: list[str]
) -> None:
    """A certificate without a role is refused as a reader's is. Probes, and reports, which have
    another proof, need no role."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init(roles=[CertificateRole.COORDINATOR])

    async def certified(scope: Scope, receive: Receive, send: Send) -> None:
        await shown[1]({**scope, "state": {CALLER: caller}}, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(certified), base_url="http://127.0.0.1"
    ) as http:
        with identity.using(in_folder(folder.path, CertificateRole.COORDINATOR)):
            answers = {
                path: await http.get(path)
                for path in ("/api/v1/jobs/digits", "/api/v1/jobs", "/metrics")
            }
            assert [path for path, each in answers.items() if each.status_code == 200] == read
            refused = [each for path, each in answers.items() if path not in read]
            assert {(each.status_code, each.json()["kind"]) for each in refused} <= {
                (403, "AccessDenied")
            }
            assert (await http.get("/healthz")).status_code == 200
            report = await http.post("/api/v1/jobs/digits/members/w1/health", json=REPORT_BODY)
            assert report.status_code == 204
        assert (await http.get("/api/v1/jobs")).status_code == 200, "without TLS"


def test_sessions_expire_and_their_number_is_bounded(tmp_path: Path) -> None:
    secret = tokens.add(tmp_path / "tokens", "ann", HttpRole.VIEWER)
    known, now_s = Tokens(tmp_path / "tokens"), [0.0]
    holder = known.holder(secret)
    assert holder is not None
    sessions = Sessions(known, lambda: now_s[0])
    first = sessions.begin(holder)
    assert sessions.holder(first) == holder
    now_s[0] = VALID_S
    assert sessions.holder(first) is None
    begun = [sessions.begin(holder) for _ in range(1100)]
    assert [sessions.holder(each) for each in begun[-1024:]] == [holder] * 1024
    assert [sessions.holder(each) for each in begun[:-1024]] == [None] * (1100 - 1024)


def test_the_command_prints_tokens_and_stores_their_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The owner alone can read the file."""
    file = tmp_path / "tokens"
    for name, role in (("ann", "viewer"), ("bob", "operator")):
        assert token(TokenConfig("create", name=name, role=role, file=file)) == 0  # type: ignore
    printed = capsys.readouterr().out.split()
    assert len(set(printed)) == 2 and all(
        re.fullmatch("shoal_[-_A-Za-z0-9]{43}", t) for t in printed
    )
    assert file.stat().st_mode & 0o777 == 0o600
    assert not [t for t in printed if t in file.read_text()]
    assert [each.role for each in tokens.read(file)] == [HttpRole.VIEWER, HttpRole.OPERATOR]
    assert token(TokenConfig("list", file=file)) == 0
    assert capsys.readouterr().out == "ann viewer\nbob operator\n"
    with pytest.raises(InvalidSpec, match="of that name"):
        token(TokenConfig("create", name="ann", file=file))


def test_a_token_is_added_to_a_file_without_an_end_of_its_last_line(tmp_path: Path) -> None:
    """Editors may save such files."""
    file = tmp_path / "tokens"
    first = tokens.add(file, "ann", HttpRole.VIEWER)
    file.write_text(file.read_text().rstrip("\n"))
    second = tokens.add(file, "bob", HttpRole.VIEWER)
    known = Tokens(file)
    assert [known.holder(secret) is not None for secret in (first, second)] == [True, True]
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_a_file_that_its_group_can_read_is_accepted(tmp_path: Path, mode: int) -> None:
    """Files of a Kubernetes Secret belong to root and the pod's group."""
    file = tmp_path / "tokens"
    secret = tokens.add(file, "ann", HttpRole.VIEWER)
    file.chmod(mode)
    assert Tokens(file).holder(secret) is not None


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o666, 0o644])
def test_a_file_with_access_for_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "tokens"
    tokens.add(file, "ann", HttpRole.VIEWER)
    file.chmod(mode)
    with pytest.raises(InvalidSpec, match="chmod 600"):
        Tokens(file)


@pytest.mark.parametrize(
    "text", ["ann viewer", "ann boss " + "0" * 64, "ann viewer secret", "a b c d"]
)
def test_the_error_for_a_bad_line_has_only_its_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    tokens.add(file, "good", HttpRole.VIEWER)
    with file.open("a") as lines:
        lines.write(text + "\n")
    with pytest.raises(InvalidSpec, match="line 2") as raised:
        Tokens(file)
    assert text not in str(raised.value)


def test_pages_of_two_ports_of_a_host_have_cookies_of_their_own() -> None:
    """A browser sends the cookies of all ports: a login at one page must not end another's."""
    names = [cookie_name(host) for host in ("localhost:7780", "localhost:7781", "[::1]:7780")]
    assert names == ["shoal_session_7780", "shoal_session_7781", "shoal_session_7780"]
    assert cookie_name("page.example") == cookie_name("a:b") == "shoal_session"
    made = cookie("secret", "localhost:7780", is_https=False)
    given = (b"cookie", made.partition(";")[0].encode())
    for host, secret in ((b"localhost:7780", "secret"), (b"localhost:7781", "")):
        assert session_of({"headers": [(b"host", host), given]}) == secret
