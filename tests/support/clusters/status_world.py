"""A coordinator's state for tests of the status endpoint, set by the test."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from support.processes.loop_thread import LoopThread

from shoal_proto.errors import Unavailable, UnknownMember
from shoal_proto.incarnation import public_id
from shoal_server.serving.access.caller_proof import CallerProof
from shoal_server.status.app import build_app
from shoal_server.status.board import StatusBoard
from shoal_server.status.from_core import shown_state
from shoal_server.status.history.records import ChangeView
from shoal_server.status.history.series import Reading, Series
from shoal_server.status.serve import StatusServer
from shoal_server.status.views import (
    ConflictView,
    CopyView,
    EpochSamplesView,
    FullPeerView,
    GenerationView,
    HealthView,
    JobDetail,
    JobSummary,
    LoopLagView,
    MemberDetail,
    MemberView,
    OutputView,
    ProcessView,
    PublishedSeriesView,
    PublishedVersionView,
    PushesView,
    Readiness,
    ReplicationView,
    RosterEntryView,
    SamplesView,
    ServerView,
    ShardsView,
    ShardView,
    WeightReaderView,
)

FULL = "the server has no memory left for a copy of shard [2]"
PUSHES = PushesView(applied=811, duplicates=2, staleness_counts=(300, 400, 111))
PAGE_LINES = 50
SUMMARY = {each.name for each in fields(JobSummary)}
READY = Readiness(ready=True, reason="leads and reaches etcd", leader="10.0.0.2:7700")


@dataclass
class World:
    """A StatusSource whose answers are fields."""

    ready: Readiness = READY
    by_name: dict[str, JobDetail] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    """Jobs that are still being read from etcd."""
    samples_of: dict[str, SamplesView] = field(default_factory=dict)
    shards_of: dict[str, ShardsView] = field(default_factory=dict)
    shards_error: Exception | None = None
    published: list[PublishedSeriesView] = field(default_factory=list)
    printed: dict[str, list[str]] = field(default_factory=dict)
    """Output lines by member, of any job; a position is a line's number."""
    launchers_live: bool = True
    silent: set[str] = field(default_factory=set)
    """Members whose launcher does not answer."""
    askers: list[CallerProof] = field(default_factory=list)
    """Callers that asked for output lines."""
    board: StatusBoard = field(default_factory=StatusBoard)

    def renew(self) -> None:
        """Reset the world to its first state; applications that were built on it show that."""
        board, fresh = self.board, World()
        vars(board).update(vars(fresh.board))
        vars(self).update({**vars(fresh), "board": board})

    def readiness(self) -> Readiness:
        return self.ready

    def jobs(self) -> Sequence[JobDetail]:
        return [
            replace(job, generations=(), samples=self.samples_of.get(name))
            for name, job in self.by_name.items()
        ]

    def job(self, name: str) -> JobDetail | None:
        if name in self.unread:
            raise Unavailable(f"job {name} is being read from etcd")
        job = self.by_name.get(name)
        return None if job is None else replace(job, samples=self.samples_of.get(name))

    async def generations(self, name: str) -> Sequence[GenerationView]:
        return self.by_name[name].generations

    def member(self, name: str, member_id: str) -> MemberView | None:
        entries = self.by_name[name].members if name in self.by_name else ()
        members = (entry.member for entry in entries)
        return next((each for each in members if each.member_id == member_id), None)

    def process(self, name: str, member_id: str) -> str | None:
        member = self.member(name, member_id)
        return None if member is None else member.public_id

    async def shards(self, job: str) -> ShardsView | None:
        if self.shards_error is not None:
            raise self.shards_error
        return self.shards_of.get(job)

    def weights(self, job: str = "") -> Sequence[PublishedSeriesView]:
        return [each for each in self.published if each.series.startswith(f"{job}/" if job else "")]

    async def output(
        self, job: str, member_id: str, who: CallerProof, after: str | None, before: str | None
    ) -> OutputView:
        self.askers.append(who)
        if member_id in self.silent:
            raise Unavailable(f"the launcher of {member_id} did not answer")
        if member_id not in self.printed:
            what = f"no launcher passes on the output of {member_id}"
            raise UnknownMember(what, fix="Look there.")
        lines = self.printed[member_id]
        start, stop = max(0, len(lines) - PAGE_LINES), len(lines)
        if after is not None:
            start = int(after.removeprefix("ab-"))
            stop = min(start + PAGE_LINES, stop)
        elif before is not None:
            stop = int(before.removeprefix("ab-"))
            start = max(0, stop - PAGE_LINES)
        return OutputView(
            job=job,
            member_id=member_id,
            host="node-0",
            is_live=self.launchers_live,
            lines=tuple(lines[start:stop]),
            before=f"ab-{start}" if start else None,
            after=f"ab-{stop}",
        )

    def put(self, job: JobDetail) -> None:
        self.by_name[job.summary.job] = job

    def change(self, job: str, **changes: object) -> None:
        self.by_name[job] = changed(self.by_name[job], **changes)


@contextmanager
def endpoint(world: World, port: int = 0) -> Iterator[StatusServer]:
    """Run the status endpoint of a coordinator, on an event loop in another thread."""
    server = StatusServer(build_app(world, world.board), "127.0.0.1", port)
    with LoopThread("status") as loop:
        loop.run(server.__aenter__())
        try:
            yield server
        finally:
            loop.run(server.__aexit__(None, None, None))


def member(member_id: str, rank: int | None = None, **fields: object) -> MemberView:
    """Make the view of a member that trains, or is on standby if it has no rank."""
    now_s = time.time()
    known: dict[str, object] = {
        "member_id": member_id,
        "public_id": public_id(f"incarnation-of-{member_id}"),
        "state": "standby" if rank is None else "training",
        "waiting_for": "nothing: it trains",
        "waiting_since_unix_s": now_s - 40,
        "rank": rank,
        "generation": 0 if rank is None else 3,
        "process": ProcessView(
            host=f"node-{(rank or 0) // 2}",
            pid=4000 + (rank or 0),
            address=f"10.0.1.{10 + (rank or 0)}",
            device="cpu",
            torch_version="2.13.0",
        ),
        "step": 1200,
        "joined_unix_s": now_s - 300,
        "last_seen_unix_s": now_s,
        "takes_part": True,
    }
    return MemberView(**{**known, **fields})  # type: ignore[arg-type]


def generation(number: int, member_ids: Sequence[str], **fields: object) -> GenerationView:
    """Make the view of a committed generation of these members, in rank order."""
    known: dict[str, object] = {
        "generation": number,
        "verdict": "committed",
        "reason": f"all {len(member_ids)} members accepted generation {number}",
        "decided_unix_s": time.time() - 60,
        "members": tuple(
            RosterEntryView(
                member_id=member_id,
                public_id=public_id(f"incarnation-of-{member_id}"),
                rank=rank,
                host=f"node-{rank // 2}",
                address=f"10.0.1.{10 + rank}",
                state_action="keep",
            )
            for rank, member_id in enumerate(member_ids)
        ),
        "source_member_id": member_ids[0],
        "digest": "5f" * 32,
    }
    return GenerationView(**{**known, **fields})  # type: ignore[arg-type]


def job(name: str = "digits", **changes: object) -> JobDetail:
    """Make a job that runs generation 3 with members w0, w1 and w2, with these changes."""
    now_s = time.time()
    summary = JobSummary(
        job=name,
        phase="running",
        state="running",
        shown_state="running",
        reason="generation 3 runs with 3 members",
        since_unix_s=now_s - 42,
        generation=3,
        num_members=3,
        num_training=3,
        step=0,
        begun_unix_s=0.0,
        ended_unix_s=0.0,
        num_restarts=0,
        loss=None,
        num_samples=None,
        goodput=None,
    )
    known = JobDetail(
        summary=summary,
        min_members=2,
        max_members=8,
        desired_members=3,
        synchronous=True,
        fields={"strategy": "ddp", "global_batch": "256", "seed": "0"},
        members=(),
        generations=(generation(3, ["w0", "w1", "w2"]), generation(1, ["w0", "w1"])),
        samples=None,
    )
    return changed(known, **{"members": [member(f"w{rank}", rank) for rank in range(3)], **changes})


def changed(job: JobDetail, **changes: Any) -> JobDetail:
    """Change fields of the job and of its summary, and what follows from them. `members`: views."""
    of_summary = {name: changes.pop(name) for name in SUMMARY & set(changes)}
    if "members" in changes:
        members = changes["members"]
        of_summary["num_members"] = len(members)
        of_summary["num_training"] = sum(each.state == "training" for each in members)
        entries = (MemberDetail(member=each, health=None, losses=()) for each in members)
        changes["members"] = tuple(entries)
    summary = replace(job.summary, **of_summary)
    shown = shown_state(summary.state, summary.phase)
    return replace(job, summary=replace(summary, shown_state=shown), **changes)


def shards(*, silent: str = "") -> ShardsView:
    """Make the view of four shards on two servers; `silent` names a server that does not answer."""
    servers = []
    for server_id in ("ps0", "ps1"):
        down = server_id == silent
        servers.append(
            ServerView(
                server_id=server_id,
                address=f"10.0.2.{server_id[2:]}:7710",
                state="unreachable" if down else "serving",
                error=f"no answer from {server_id} in time" if down else "",
                memory_bytes=0 if down else 150 << 20,
                num_copies=0 if down else 2,
                unfinished_bytes=0 if down else 3 << 20,
                refused_by_epoch=0 if down else 7,
                partial_pushes=0 if down else 1,
                held_bytes=0 if down else 160 << 20,
                loop_lag=LoopLagView(p99_s=0.25),
                memory_limit_bytes=0 if down else 1 << 30,
                full_peers=() if down else (FullPeerView(server_id="ps1", reason=FULL),),
            )
        )
    placed = []
    for shard_id in range(4):
        server_id = f"ps{shard_id % 2}"
        live = server_id != silent
        placed.append(
            ShardView(
                shard_id=shard_id,
                server_id=server_id,
                epoch=1,
                dtype="float32",
                num_elements=250_000 * (4 - shard_id),
                parameters=(f"layers.{shard_id}.weight", f"layers.{shard_id}.bias"),
                created=live,
                version=812 + shard_id if live else 0,
                num_bytes=1_000_000 * (4 - shard_id) if live else 0,
                pushes=PUSHES if live else PushesView(),
                replication=ReplicationView(
                    copies=(CopyView(server_id=f"ps{1 - shard_id % 2}", version=810),),
                    lag=2 + shard_id,
                    unreplicated_bytes=4096,
                )
                if live
                else ReplicationView(),
            )
        )
    return ShardsView(servers=tuple(servers), shards=tuple(placed), skew=1.25)


def published(series: str = "digits/policy", *, differs: bool = False) -> PublishedSeriesView:
    """Make the view of a series with one version, which one reader serves."""
    version = PublishedVersionView(
        version=57,
        step=1200,
        created_unix_s=time.time() - 60,
        num_bytes=3 * 2**20,
        num_copies=2,
        digest="ab" * 32,
        pinned=True,
        durable=False,
        rolled_back_to=0,
    )
    reader = WeightReaderView(
        reader_id="engine-0",
        version=57,
        digest=("cd" if differs else "ab") * 32,
        differs=differs,
        lag_versions=0,
        seen_unix_s=time.time() - 2,
        fetch_s=0.5,
        fetch_bytes=3 * 2**20,
    )
    return PublishedSeriesView(
        series=series,
        version=57,
        publisher="generation 4",
        versions=(version,),
        readers=(reader,),
        num_readers=1,
        num_differing=int(differs),
        lost=(),
        num_lost=0,
    )


def samples() -> SamplesView:
    """Make the view of the samples of a job in its fourth epoch, after one loss."""
    return SamplesView(
        dataset_size=1437,
        num_epochs=10,
        completed=5000,
        in_flight=96,
        returned=64,
        ignored=32,
        repeated_max=96,
        exhausted=False,
        epochs=(EpochSamplesView(epoch=3, completed=689, in_flight=96, returned=64),),
    )


def conflict() -> ConflictView:
    """Make the view of a conflict: members with different seeds."""
    return ConflictView(field="seed", values={"0": ("w0", "w1"), "7": ("w4",)})


def charted(board: StatusBoard, job: str = "digits", seconds: int = 240) -> None:
    """Give the job a history of `seconds`, with a falling loss and a lost member."""
    series, begun_s = Series(), time.time() - seconds
    for second in range(seconds):
        reading = Reading(
            generation=3 if second < seconds // 2 else 4,
            step=10 * second,
            losses=(2.0 / (1 + second / 20),),
            samples_per_s=(900.0 + second % 7, 850.0),
            step_s={0: 0.010, 1: 0.012, 2: 0.031},
            staleness=(1.5,),
        )
        series.add(reading, begun_s + second)
    change = ChangeView(
        generation=3,
        unix_s=begun_s + seconds // 2,
        cause="lost w9 (SIGKILL); 3 go on",
        line="generation 3: lost w9 (SIGKILL); 3 go on; paused 0.06 s; 0 steps lost",
        num_members=3,
        lost=("w9",),
        paused_s=0.06,
    )
    board.restore_history(job, series.view(), (change,), 0.0)


def health(member_id: str, **fields: object) -> HealthView:
    """Make the view of a member's health report."""
    known: dict[str, object] = {
        "public_id": public_id(f"incarnation-of-{member_id}"),
        "received_unix_s": time.time(),
        "step": 1200,
        "loss": 0.25,
    }
    return HealthView(**{**known, **fields})  # type: ignore[arg-type]
