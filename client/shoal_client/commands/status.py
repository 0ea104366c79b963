"""`shoal status` and `shoal why`: show data of the coordinator's HTTP API as tables."""

import json
import os
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal_client.commands.address import StatusAddress
from shoal_client.connection.http import direct_http_client
from shoal_proto.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidSpec,
    NotLeader,
    RetryError,
    ShoalError,
    Unavailable,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.names import check_name
from shoal_proto.short_lists import short_list
from shoal_proto.terminal import printable_json
from shoal_proto.tls import identity, local_clusters
from shoal_proto.tls.names import COORDINATOR_NAME

ANSWER_WITHIN_S = 5.0
MAX_SHOWN_SHARDS = 8
MAX_SHOWN_MEMBERS = 10
WIDE = 100
"""Width of a terminal, in columns, from which members' hosts are shown and no table is split."""

BY_ROLE = {"sni_hostname": COORDINATOR_NAME}
"""The server's certificate must have a coordinator's name, not the address."""

Json = Any
"""Decoded answer."""


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Shows jobs, members, generations and shards."""

    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print JSON instead of tables."""
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """Show only this job."""
    every: Annotated[bool, Parameter(name=["--all", "-a"], negative=())] = False
    """Also show jobs that have ended. By default they are only counted, and the newest of them is
    shown if all jobs have ended."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)

    def __post_init__(self) -> None:
        if self.job:
            check_name(self.job, "job")


@dataclass(frozen=True, kw_only=True)
class WhyConfig:
    """Shows what a member is waiting for. For a job: the reason for its state, and what its members
    wait for."""

    name: str = field(kw_only=False)
    """Name of a job, or id of a member."""
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """The member's job. Needed only if several jobs have a member of this name."""
    address: Annotated[StatusAddress, Parameter(name="*")] = field(default_factory=StatusAddress)
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print JSON instead of text."""

    def __post_init__(self) -> None:
        check_name(self.name, "member" if self.job else "job")
        if self.job:
            check_name(self.job, "job")


def _with_scheme(url: str) -> str:
    """Return the URL of HOST:PORT or of an http URL: https if this process has a certificate,
    except for a cluster of this user on this machine."""
    host = url.removeprefix("http://")
    if "://" in host:
        return url
    is_plain = identity.own() is None or local_clusters.find([host]) is not None
    return f"http://{host}" if is_plain else f"https://{host}"


def _token() -> str:
    file = os.environ.get("SHOAL_TOKEN_FILE", "")
    if (token := os.environ.get("SHOAL_TOKEN", "")) or not file:
        return _checked(token, "$SHOAL_TOKEN")
    try:
        return _checked(Path(file).read_text("utf-8-sig").strip(), "$SHOAL_TOKEN_FILE")
    except (OSError, UnicodeError) as error:
        raise InvalidSpec(
            "the token in $SHOAL_TOKEN_FILE cannot be read",
            seen=str(error),
            expected="a file with a token of `shoal token create`",
        ) from error


def _checked(token: str, source: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise InvalidSpec(
            f"the token in {source} is not a token",
            seen="characters that no token has",
            expected="a token of `shoal token create`",
        )
    return token


def _context() -> ssl.SSLContext | None:
    own = identity.own()
    return None if own is None else own.material.client


class StatusClient:
    """Client of the coordinators' HTTP API. `urls` are separated by commas; the leader answers.
    Raises the error that the server names. Control characters in answers are escaped."""

    def __init__(self, urls: str) -> None:
        self._urls = [_with_scheme(url.strip().rstrip("/")) for url in urls.split(",")]
        token = _token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._context = _context()
        self._http = self._client()

    def _client(self) -> httpx.Client:
        return direct_http_client(
            timeout_s=ANSWER_WITHIN_S, headers=self._headers, context=self._context
        )

    def __enter__(self) -> "StatusClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def leader(self) -> str:
        """host:port of the coordinator that leads. Raises Unavailable if none does."""
        # A coordinator that does not lead names the leader, with status 503.
        answer = self._get("/readyz", known=(503,))
        if not answer["leader"]:
            raise Unavailable("no coordinator leads the cluster", seen=answer["reason"])
        return str(answer["leader"])

    def jobs(self) -> Json:
        """Summaries of all jobs."""
        return self._get("/api/v1/jobs")

    def job(self, job: str) -> Json:
        """The job with its members, newest generations and samples."""
        return self._get(f"/api/v1/jobs/{quote(job, safe='')}")

    def shards(self, job: str) -> Json:
        """The job's shards and their servers."""
        return self._get(f"/api/v1/jobs/{quote(job, safe='')}/shards")

    def weights(self) -> Json:
        """All series of published weights."""
        return self._get("/api/v1/weights")

    def member(self, job: str, member_id: str) -> Json:
        """A member."""
        return self._get(f"/api/v1/jobs/{quote(job, safe='')}/members/{quote(member_id, safe='')}")

    def job_of(self, member_id: str) -> str:
        """The job that has this member. Raises UnknownMember, or InvalidSpec if several jobs do."""
        found, known = [], []
        for job in (each["job"] for each in self.jobs() if each["num_members"]):
            try:
                members = [entry["member"]["member_id"] for entry in self.job(job)["members"]]
            except UnknownJob:
                continue  # removed since it was listed
            known += members
            found += [job] if member_id in members else []
        if len(found) > 1:
            raise InvalidSpec(
                f"several jobs have a member {member_id}",
                seen=", ".join(found),
                expected="the name of one",
                fix="Give it with --job NAME.",
            )
        if not found:
            shown = ", ".join(known[:MAX_SHOWN_MEMBERS])
            raise UnknownMember(
                f"no job has a member {member_id}",
                expected=f"one of {shown}" if shown else "an existing member",
                fix="`shoal status` lists the members.",
            )
        return str(found[0])

    def output(
        self, job: str, member_id: str, *, after: str | None = None, before: str | None = None
    ) -> Json:
        """The newest lines of the member's output, or lines on one side of a position."""
        asked = [f"{k}={v}" for k, v in (("after", after), ("before", before)) if v is not None]
        path = f"/api/v1/jobs/{quote(job, safe='')}/members/{quote(member_id, safe='')}/output"
        return self._get(f"{path}?{'&'.join(asked)}")

    def events(
        self, job: str, after: int, *, details: bool = True, newest: int | None = None
    ) -> Json:
        """Up to 1000 events with ids above `after`, oldest first, or the last `newest` of them."""
        query = f"after={after}&details={str(details).lower()}&limit=1000"
        answer = self._get(f"/api/v1/jobs/{quote(job, safe='')}/events?{query}")
        if newest is not None:
            answer["events"] = answer["events"][-newest:]
        return answer

    def why(self, job: str, member_id: str) -> Json:
        """Reason why the member waits."""
        path = f"/api/v1/jobs/{quote(job, safe='')}/members/{quote(member_id, safe='')}/why"
        return self._get(path)

    def _get(self, path: str, known: Sequence[int] = ()) -> Json:
        failure: ShoalError | None = None
        for url in self._urls:
            try:
                return self._get_from(url, path, known)
            except (NotLeader, Unavailable, DeadlineExceeded) as error:
                # The next coordinator may lead. The leader's own error says more than NotLeader.
                if failure is None or not isinstance(error, NotLeader):
                    failure = error
        assert failure is not None
        raise failure

    def _get_from(self, url: str, path: str, known: Sequence[int]) -> Json:
        if (now := _context()) is not self._context:
            self._http.close()
            self._context, self._http = now, self._client()
        try:
            response = self._http.get(url + path, extensions=BY_ROLE)
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise DeadlineExceeded(
                f"the coordinator at {url} did not answer in time",
                seen=f"nothing for {ANSWER_WITHIN_S:g} s",
                fix="It or its machine may be overloaded: try again.",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(
                f"no coordinator answers at {url}",
                seen=str(error) or type(error).__name__,
                expected="the HTTP address of a Shoal coordinator",
                fix="Give it with --http URL or $SHOAL_HTTP; `shoal up` prints it.",
            ) from error
        try:
            body = printable_json(response.json())
        except ValueError:
            body = None
        if (response.is_success or response.status_code in known) and body is not None:
            return body
        if isinstance(body, dict) and "kind" in body:
            kind = ShoalError.kinds.get(str(body["kind"]), InternalError)
            what, seen, expected, fix = (
                str(body.get(name, "")) for name in ("what", "seen", "expected", "fix")
            )
            raise kind(what, seen=seen, expected=expected, fix=fix)
        raise Unavailable(
            f"{url} does not answer like a Shoal coordinator",
            seen=f"HTTP {response.status_code} for {path}",
            fix="Give its address with --http URL or $SHOAL_HTTP.",
        )


def status(config: StatusConfig) -> int:
    """Print the jobs that the config selects; return 1 if a job of the list cannot be shown yet.
    Raises Unavailable if none can."""
    urls = config.address.urls()
    with StatusClient(urls) as client:
        every = [] if config.job else client.jobs()
        shown = every if config.every or config.as_json else _shown_by_default(every)
        names = [config.job] if config.job else [job["job"] for job in shown]
        jobs, failed = [], list[Unavailable]()
        for name in names:
            try:
                jobs.append({**client.job(name), **_shards(client, name)})
            except Unavailable as error:
                failed.append(error)  # a new leader still reads this job
            except UnknownJob:
                if config.job:
                    raise
                # Another job was removed since it was listed.
        if failed and not jobs:
            raise failed[0]
        for failure in failed:
            print(failure, file=sys.stderr)
        scripts = [] if config.job else _series_without_job(client, [job["job"] for job in every])
    if config.as_json:
        print(json.dumps(jobs, indent=2))
        return 1 if failed else 0
    console = Console()
    if not config.job and not every:
        console.print(f"The coordinator at {escape(urls)} has no jobs.")
    for job in jobs:
        _print_job(console, job)
    for series in scripts:
        _print_weights(console, series)
    if num_over := len(every) - len(shown):
        jobs_have, them = ("job has", "it") if num_over == 1 else ("jobs have", "them")
        text = f"{num_over} more {jobs_have} ended: --all shows {them}, `shoal jobs` lists {them}"
        console.print(f"\n{text}")
    return 1 if failed else 0


def _series_without_job(client: StatusClient, jobs: Sequence[str]) -> list[Json]:
    try:
        found = client.weights()
    except RetryError:
        return []
    return [each for each in found if each["series"].partition("/")[0] not in jobs]


def _shown_by_default(jobs: Json) -> Json:
    left = [each for each in jobs if not each["ended_unix_s"]]
    return left or sorted(jobs, key=lambda job: job["ended_unix_s"])[-1:]


def _shards(client: StatusClient, job: str) -> Json:
    """The shards, or the error if they cannot be read: other jobs are still shown."""
    try:
        return {"shards": client.shards(job), "shards_error": ""}
    except (NotLeader, Unavailable, UnknownJob):
        raise
    except ShoalError as error:
        none: Json = {"servers": [], "shards": [], "skew": 1.0, "lost": [], "accepted_losses": []}
        return {"shards": none, "shards_error": str(error)}


def why(config: WhyConfig) -> int:
    """Print why a member waits, or why the members of a job do."""
    with StatusClient(config.address.urls()) as client:
        job = config.job
        if not job:
            try:
                return _why_job(client.job(config.name), as_json=config.as_json)
            except UnknownJob as error:
                job = job_of_member(client, config.name, error)
        answer = client.why(job, config.name)
    if config.as_json:
        print(json.dumps(answer, indent=2))
        return 0
    console = Console(highlight=False)
    member = f"[bold]{escape(answer['member_id'])}[/bold] ({escape(answer['state'])})"
    for_s = duration(answer["waiting_s"])
    console.print(f"{member} waits for: {escape(answer['waiting_for'])} [dim]({for_s})[/dim]")
    state = escape(answer["shown_state"])
    console.print(f"job {escape(answer['job'])}: {state}: {escape(answer['reason'])}")
    for loss in answer.get("lost_shards", ()):
        console.print(f"lost: {escape(loss)}", style="red")
    if answer["last_error"]:
        console.print(f"its last error: {escape(answer['last_error'])}", style="red")
    return 0


def job_of_member(client: StatusClient, name: str, no_job: UnknownJob) -> str:
    """The job of the member `name`. Raises UnknownJob without one. `no_job`: the error for a job of
    that name."""
    try:
        return client.job_of(name)
    except UnknownMember as no_member:
        raise UnknownJob(
            f"no job and no member is named {name}",
            seen=name,
            expected=f"{no_job.expected}, or {no_member.expected}",
            fix="Both exist once a worker has joined; workers may still start."
            " `shoal status` lists jobs and members.",
        ) from None


def _why_job(job: Json, *, as_json: bool) -> int:
    summary = job["summary"]
    if as_json:
        print(json.dumps(summary, indent=2))
        return 0
    console = Console(highlight=False)
    head = f"[bold]{escape(summary['job'])}[/bold] ({summary['shown_state']})"
    console.print(f"{head}: {escape(summary['reason'])}", soft_wrap=True)
    _print_last_ending(console, summary)
    _print_waits(console, job["members"])
    return 0


def _print_last_ending(console: Console, summary: Json) -> None:
    if ending := summary.get("last_ending"):
        message = f"last member to leave: {escape(ending)}"
        console.print(message, style="red", highlight=False, soft_wrap=True)


def _print_job(console: Console, job: Json) -> None:
    summary = job["summary"]
    now_s = now_of(summary)
    console.print()
    console.rule(f"[bold]{escape(summary['job'])}[/bold]  {summary['shown_state']}", align="left")
    _print_last_ending(console, summary)
    bounds = f"{job['min_members']} to {job['max_members']} members"
    generation = summary["generation"] or "none yet"
    console.print(f"generation {generation}, step {summary['step']}, {bounds}", highlight=False)
    console.print(escape(summary["reason"]), style="dim", highlight=False)
    if run := job.get("run"):
        _print_run(console, run)
    if job["shards_error"]:
        console.print(f"its shards are not known: {escape(job['shards_error'])}", style="red")
    _print_members(console, job["members"], now_s)
    _print_generations(console, job["generations"][:5], now_s)
    if job["samples"]:
        _print_samples(console, job["samples"])
    if job["shards"]["shards"]:
        _print_servers(console, job["shards"], now_s)
    for series in job.get("weights", ()):
        _print_weights(console, series)


def _print_run(console: Console, run: Json) -> None:
    changed = ", modified" if run["is_modified"] else ""
    commit = f"  (commit {run['commit'][:12]}{changed})" if run["commit"] else ""
    console.print(f"runs {escape(run['command'] + commit)}", highlight=False, soft_wrap=True)


def _print_weights(console: Console, series: Json) -> None:
    served: dict[str, list[str]] = {}
    for reader in series["readers"]:
        held = f"{reader['version']} {reader['digest'][:12]}" if reader["version"] else "none yet"
        served.setdefault(held, []).append(reader["reader_id"])
    line = f"weights {escape(series['series'])}: version {series['version']}"
    if series["versions"]:
        newest = series["versions"][-1]
        size = f"{newest['num_bytes'] / 2**20:.1f} MiB in {newest['num_copies']} copies"
        line += f" of step {newest['step']}, {size}, {len(series['versions'])} kept"
    console.print(line, highlight=False)
    for held, names in sorted(served.items(), reverse=True):
        console.print(f"  serve {held}: {escape(short_list(names, 8))}", highlight=False)
    for reader in series["readers"]:
        if reader["differs"]:
            text = f"served weights differ: {reader['reader_id']} has other bytes than version"
            message = (
                f"{text} {reader['version']} of {series['series']}: digest {reader['digest'][:12]}"
            )
            console.print(escape(message), style="red", highlight=False)
    if series["lost"]:
        versions = ", ".join(map(str, series["lost"]))
        console.print(
            f"lost versions: {versions} (no server has them)", style="red", highlight=False
        )


def _print_members(console: Console, members: Json, now_s: float) -> None:
    # In a narrow terminal the reasons are printed below the table.
    wide = console.width >= WIDE
    stale = any((entry["health"] or {}).get("staleness_steps") is not None for entry in members)
    bounded = any(entry["member"]["clock"] is not None for entry in members)
    fast = wide or not (stale and bounded)
    names = ["member", "rank>", "state", "step>", "loss>"] + ["samples/s>"] * fast + ["seen>"]
    names += ["pid>"] + ["host"] * wide + ["stale>"] * stale + ["round>"] * bounded
    table = table_of(*names)
    if wide:
        table.add_column("waits for", overflow="fold", ratio=1)
    for entry in members:
        member, health = entry["member"], entry["health"] or {}
        table.add_row(
            escape(member["member_id"]),
            number(member["rank"], "d"),
            escape(member["state"]),
            number(max(member["step"], health.get("step") or 0), "d"),
            number(health.get("loss"), ".4g"),
            *([number(health.get("samples_per_s"), ".0f")] * fast),
            duration(now_s - member["last_seen_unix_s"]),
            str(member["process"]["pid"]),
            *([escape(member["process"]["host"])] * wide),
            *([number(health.get("staleness_steps"), ".1f")] * stale),
            *([number(member["clock"], "d")] * bounded),
            *([escape(member["waiting_for"])] * wide),
        )
    console.print(table if members else "no members", highlight=False)
    if not wide:
        _print_waits(console, members)


def _print_waits(console: Console, members: Json) -> None:
    waits: dict[str, list[str]] = {}
    for entry in members:
        member = entry["member"]
        if member["state"] != "training" or member["waiting_for"] != "nothing: it trains":
            waits.setdefault(member["waiting_for"], []).append(member["member_id"])
    for waiting_for, names in waits.items():
        verb = "waits" if len(names) == 1 else "wait"
        line = f"{', '.join(names)} {verb} for: {waiting_for}"
        console.print(escape(line), highlight=False)


def _print_generations(console: Console, generations: Json, now_s: float) -> None:
    if not generations:
        return
    table = table_of("generation>", "verdict", "members>", "from step>", "ago>")
    table.add_column("reason", overflow="fold", ratio=1)
    for record in generations:
        table.add_row(
            str(record["generation"]),
            record["verdict"],
            str(len(record["members"])),
            "planned" if record["planned"] else str(record["step"]),
            duration(now_s - record["decided_unix_s"]),
            escape(record["reason"]),
        )
    console.print(table, highlight=False)


def _print_samples(console: Console, samples: Json) -> None:
    total = samples["dataset_size"] * samples["num_epochs"]
    console.print(
        f"samples: {samples['completed']} of {total} completed, {samples['in_flight']} in flight,"
        f" at most {samples['repeated_max']} repeated",
        highlight=False,
    )


def _print_servers(console: Console, view: Json, now_s: float) -> None:
    columns = ["state", "address", "shards>", "copies>", "MiB>", "updates>"]
    load = ["pushes>", "retries>", "refused>", "lag>", "queued MiB>", "held MiB>", "limit MiB>"]
    # In a narrow terminal these are two tables.
    for names in [[*columns, *load]] if console.width >= WIDE else [columns, load]:
        table = table_of("server", *names)
        for server in view["servers"]:
            shards = [s for s in view["shards"] if s["server_id"] == server["server_id"]]
            figures = _server_figures(server, shards)
            shown = [figures[name.removesuffix(">")] for name in names]
            table.add_row(escape(server["server_id"]), *shown)
        console.print(table, highlight=False)
    for server in view["servers"]:
        for peer in server["full_peers"]:
            text = f"{peer['server_id']} accepts no further copies from {server['server_id']}: "
            console.print(escape(text + peer["reason"]), highlight=False)
    for loss in view["lost_in_words"]:
        console.print(f"lost: {escape(loss)}", style="red", highlight=False)
    _print_accepted_losses(console, view["accepted_losses"], now_s)
    versions = {s["torch_version"]: s["server_id"] for s in view["servers"] if s["torch_version"]}
    if len(versions) > 1:
        listed = ", ".join(f"{server_id} {version}" for version, server_id in versions.items())
        text = (
            f"servers run several versions of torch ({listed}): copies may differ in the last bits"
        )
        console.print(escape(text), highlight=False)
    console.print(f"skew of parameter bytes over servers: {view['skew']:.3f}", highlight=False)


def _print_accepted_losses(console: Console, accepted: Json, now_s: float) -> None:
    alike: dict[tuple[str, float, bool], list[Json]] = {}
    for each in accepted:
        key = (each["by"], each["accepted_unix_s"], each.get("samples_anew", False))
        alike.setdefault(key, []).append(each)
    for (by, accepted_unix_s, samples_anew), shards in alike.items():
        texts = (in_short(s["shard_id"], s["version"]) for s in shards)
        which = short_list(texts, MAX_SHOWN_SHARDS, len(shards))
        samples = "samples started over" if samples_anew else "samples stayed counted"
        ago = duration(now_s - accepted_unix_s)
        console.print(
            f"loss of {escape(which)} accepted by {escape(by)} {ago} ago; {samples}",
            highlight=False,
        )


def in_short(shard_id: int, version: int) -> str:
    """Text of a lost shard. `version`: the shard had at least this version; 0: not known."""
    return f"shard {shard_id} ({f'at least version {version}' if version else 'no version known'})"


def _server_figures(server: Json, shards: Json) -> dict[str, str]:
    """Figures by column name. `shards`: shards with this server as primary."""
    return {
        "state": server["state"],
        "address": escape(server["address"]),
        "shards": str(len(shards)),
        "copies": str(server["num_copies"]),
        "MiB": f"{sum(s['num_bytes'] for s in shards) / 2**20:.1f}",
        "updates": str(sum(s["version"] for s in shards)),
        "pushes": str(sum(s["pushes"]["applied"] for s in shards)),
        "retries": str(sum(s["pushes"]["duplicates"] for s in shards)),
        "refused": str(sum(s["pushes"]["refused"] for s in shards) + server["refused_by_epoch"]),
        "lag": str(max((s["replication"]["lag"] for s in shards), default=0)),
        "queued MiB": f"{server['unfinished_bytes'] / 2**20:.1f}",
        "held MiB": f"{server['held_bytes'] / 2**20:.1f}",
        "limit MiB": f"{server['memory_limit_bytes'] / 2**20:.0f}",
    }


def table_of(*columns: str) -> Table:
    """A table; a column whose name ends in > is right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for column in columns:
        name = column.removesuffix(">")
        table.add_column(name, justify="right" if name != column else "left", no_wrap=True)
    return table


def number(value: float | str | None, form: str) -> str:
    """Text of a figure in this format; "-" for None. A text stays as it is."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, form)


def now_of(summary: Json) -> float:
    """The coordinator's time when it gave the summary of a job: this host's clock may differ.
    Coordinators of an earlier release do not send it."""
    return float(summary.get("now_unix_s") or time.time())


def duration(seconds: float) -> str:
    """Text of a duration in a suitable unit."""
    seconds = max(0.0, seconds)
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
