"""Data that the HTTP API shows. The OpenAPI text of each field is the sentence under it. Times are
Unix seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from shoal_proto.health import HealthFigures, RunOrigin
from shoal_server.serving.json_view import View

STATES = (
    *("running", "waiting", "interrupted", "finished", "failed", "stopped", "lost"),
    "quarantined",
)
"""States of a job, from its first member on."""
OVER = frozenset({"finished", "failed", "stopped", "lost"})
"""States in which a job takes no members until an operator allows joins or starts a new run."""


@dataclass(frozen=True, kw_only=True)
class Readiness(View):
    """Readiness of this coordinator, and the reason."""

    ready: bool
    """True while this coordinator leads. It stops leading if it cannot renew its lease in etcd."""
    reason: str
    """Reason for being ready, or not."""
    leader: str = ""
    """host:port of the coordinator that leads; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class ProcessView(View):
    """Process of a member."""

    host: str = ""
    pid: int = 0
    address: str = ""
    """IP address under which peers reach the member."""
    device: str = ""
    torch_version: str = ""
    shoal_version: str = ""


@dataclass(frozen=True, kw_only=True)
class MemberView(View):
    """A member, as the coordinator knows it from its stream and heartbeats."""

    member_id: str
    public_id: str
    """Public id of the member's incarnation: 16 hexadecimal digits."""
    state: str
    """joining, waiting, standby, preparing, bringing-up, ready, training, paused, settling,
    draining, halted or disconnected."""
    waiting_for: str
    """Description of what the member waits for."""
    waiting_since_unix_s: float
    rank: int | None = None
    """Rank in the generation that runs or is brought up; null outside of it."""
    generation: int = 0
    """Generation that the member is part of; 0 outside of any."""
    process: ProcessView = field(default_factory=ProcessView)
    step: int = 0
    """Optimizer steps, as of the member's last heartbeat or proposal."""
    clock: int | None = None
    """Round in which the member trains; null without a staleness bound."""
    joined_unix_s: float = 0.0
    last_seen_unix_s: float = 0.0
    takes_part: bool = False
    """True if the member trains, holds the job's state or is on standby: another member may leave
    for it. False while it loads its model, or receives the state."""
    """Time of the last sign of life."""


@dataclass(frozen=True, kw_only=True)
class RosterEntryView(View):
    """Entry of a generation's roster."""

    member_id: str
    public_id: str
    rank: int
    host: str = ""
    address: str = ""
    state_action: str = ""
    """initial, keep, receive or checkpoint: the source of the member's state."""


@dataclass(frozen=True, kw_only=True)
class ConflictView(View):
    """A field in which members differed."""

    field: str
    values: Mapping[str, tuple[str, ...]]
    """Each value, and the members that have it."""


@dataclass(frozen=True, kw_only=True)
class GenerationView(View):
    """Result of one attempt to form a generation."""

    generation: int
    verdict: str
    """committed or aborted."""
    reason: str
    decided_unix_s: float
    members: tuple[RosterEntryView, ...]
    """The roster, by rank."""
    source_member_id: str = ""
    """The member from which the others receive their state."""
    step: int = 0
    """The source member's step when the roster was made. The generation starts at it, unless it is
    planned."""
    planned: bool = False
    """True if the previous generation trained on meanwhile. This one then starts at the boundary,
    which the event boundary_agreed names."""
    digest: str = ""
    """SHA-256 of the roster."""
    conflicts: tuple[ConflictView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobSummary(View):
    """A job in one line."""

    job: str
    phase: str
    """collect, prepare, committed, running, aborted, finished, failed, stopped, lost (no process
    holds its state any more) or quarantined (its records in etcd cannot be used)."""
    state: str
    """running (it has members), waiting (it has none, and has not trained), interrupted (it has
    trained, and has no members now: new ones may continue), finished, failed (all its members left
    and none came back, or the last one ended with TrainingFailed), stopped (by an operator), lost
    or quarantined."""
    shown_state: str
    """The state as people see it; for a running job: waiting, starting or running, by phase."""
    reason: str
    since_unix_s: float
    """Time at which the job entered the phase."""
    generation: int
    """Newest generation number; 0 before the first."""
    num_members: int
    num_training: int
    step: int
    """Highest step that a member reported; if members train at their own pace, the sum of their
    steps. Includes members that are gone."""
    begun_unix_s: float
    """Time at which the first member joined."""
    ended_unix_s: float
    """Time at which the job ended; 0 before that."""
    num_restarts: int
    """Breaks (a member was gone, or a collective failed) after which another generation was
    committed."""
    loss: float | None
    """Loss that was reported last; null if none is known here."""
    num_samples: int | None
    """Samples that were trained on, over all epochs; null if members do not lease samples, or if
    unknown here."""
    goodput: float | None
    """Share of the job's life in which it trained: generations ran, and members did not pause for a
    change. Null before the first member joined."""
    unproductive_s: float = 0.0
    """Seconds of the job's life in which it did not train."""
    last_ending: str = ""
    """Reason for the removal of the last member of an interrupted or waiting job; else empty."""
    now_unix_s: float = 0.0
    """The coordinator's time when it answered: the clock of all its times."""


@dataclass(frozen=True, kw_only=True)
class CourseView(View):
    """Progress of a job, and the state that it would continue from."""

    num_steps: int | None = None
    """Total number of steps; null if members train at their own pace."""
    progress: float | None = None
    """Share of the job's steps, or of its samples, that is done; null if unknown."""
    eta_s: float | None = None
    """Estimated seconds to the job's end: at its recent pace if its number of steps is known, else
    at its mean pace; null if unknown."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint that members have reported."""
    checkpoint_unix_s: float | None = None
    """Time at which members first reported that checkpoint; null if this coordinator took over
    later."""
    checkpoint_bytes: int | None = None
    """Bytes of that checkpoint; null if unknown."""
    writes_checkpoints: bool | None = None
    """True if the members write checkpoints; null if unknown."""
    snapshot_unix_s: float | None = None
    """Time of this coordinator's newest snapshot."""
    logged: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Step and newest value of each name that the script logged."""


FIGURES: Mapping[str, str] = {
    name: figure["description"]
    for name, figure in TypeAdapter(HealthFigures).json_schema()["properties"].items()
}


def describe_figures(schema: dict[str, Any]) -> None:
    """Add the figures' meanings to a schema: pydantic reads only texts of a class's own fields."""
    for name, text in FIGURES.items():
        schema["properties"][name]["description"] = text


@dataclass(frozen=True, kw_only=True)
class HealthView(HealthFigures, View):
    """A member's last health report. A figure is null if it was not reported; a speed also once the
    report is older than 30 s and three of its steps."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        **View.__pydantic_config__, json_schema_extra=describe_figures
    )

    public_id: str
    """Public id of the process that reported."""
    received_unix_s: float


@dataclass(frozen=True, kw_only=True)
class MemberDetail(View):
    """A member with its last health report."""

    member: MemberView
    health: HealthView | None
    """Null before the first report of this incarnation."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of its newest reports, at most 60."""


@dataclass(frozen=True, kw_only=True)
class EventView(View):
    """An event of a job."""

    id: int
    """Number that rises from event to event; also from leader to leader if their clocks agree."""
    unix_s: float
    kind: str
    """Kind, as in the log: generation_changed, member_removed, phase_running ..."""
    reason: str
    member_id: str = ""
    generation: int = 0
    detail: bool = False
    """True for a kind of event that another event, such as generation_changed, sums up, or that
    comes with each evaluation."""


@dataclass(frozen=True, kw_only=True)
class FullPeerView(View):
    """A server that has no memory for copies of another server's shards."""

    server_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoopLagView(View):
    """Lag of a server's event loop in the last ten seconds."""

    p99_s: float = 0.0
    """99th percentile."""
    max_s: float = 0.0
    """Longest lag."""


@dataclass(frozen=True, kw_only=True)
class ComparedPiecesView(View):
    """Pieces of the server's copies that were compared with the primaries'."""

    same: int = 0
    different: int = 0
    """Pieces that differed: their copies were dropped and are made again."""


@dataclass(frozen=True, kw_only=True)
class ServerView(View):
    """A parameter server, and its state."""

    server_id: str
    address: str
    state: str
    """serving, unreachable (registered, but does not answer), or gone (its lease ended)."""
    error: str = ""
    memory_bytes: int = 0
    """Values and optimizer state of the job, including copies."""
    num_copies: int = 0
    """Number of the job's shards with a copy on the server."""
    unfinished_bytes: int = 0
    """Pushes that the server received and has not applied yet, of all jobs."""
    refused_by_epoch: int = 0
    """Parts of pushes to parameters that were refused for an outdated shard map. Their senders send
    them again."""
    partial_pushes: int = 0
    """Pushes that some shards of the server applied and others refused. Their senders send the
    refused parts again."""
    held_bytes: int = 0
    """Memory held for all jobs: shards and copies, published weights, memory shared with clients,
    reservations and unfinished data."""
    memory_limit_bytes: int = 0
    """Limit of held_bytes: beyond it no shard is created, no copy accepted, no table grows and no
    weights are published."""
    torch_version: str = ""
    """torch version of the server; empty if unknown."""
    loop_lag: LoopLagView = field(default_factory=LoopLagView)
    compared: ComparedPiecesView = field(default_factory=ComparedPiecesView)
    full_peers: tuple[FullPeerView, ...] = ()
    """Servers without memory for copies of this server's shards, which then have fewer copies."""


@dataclass(frozen=True, kw_only=True)
class CopyView(View):
    """A server that keeps a copy of a shard."""

    server_id: str
    version: int
    """Newest version that the copy is known to have."""
    joining: bool = False


@dataclass(frozen=True, kw_only=True)
class PushesView(View):
    """Outcomes of the pushes to a shard since its server got it."""

    applied: int = 0
    applied_bytes: int = 0
    """Bytes of the pushes applied since this server became the primary."""
    duplicates: int = 0
    """Pushes that were retries: answered, not applied again."""
    refused: int = 0
    """Pushes that the shard itself refused: too stale, not finite, of another size, forgotten, or
    without memory for them. Earlier refusals, such as by epoch or for a stale token, are not
    counted."""
    staleness_counts: tuple[int, ...] = ()
    """staleness_counts[i]: pushes of staleness i; the last entry also counts all larger values."""


@dataclass(frozen=True, kw_only=True)
class ReplicationView(View):
    """Copies of a shard on backups."""

    copies: tuple[CopyView, ...] = ()
    lag: int = 0
    """Updates that the slowest of the copies in step has not received."""
    unreplicated_bytes: int = 0
    """Data of pushes on their way to a copy."""


@dataclass(frozen=True, kw_only=True)
class ShardView(View):
    """Shard with its primary and its counts, which are 0 while the primary's server is silent."""

    shard_id: int
    server_id: str
    """The shard's primary."""
    epoch: int
    """Number of times that the shard's primary was decided."""
    dtype: str
    num_elements: int
    parameters: tuple[str, ...]
    """Parameters of which the shard holds blocks."""
    created: bool = False
    """True if the server holds values of the shard."""
    version: int = 0
    """Version of the values: 1 when the shard is created, 1 more with each update; 0 if it was not
    created."""
    num_bytes: int = 0
    pushes: PushesView = field(default_factory=PushesView)
    replication: ReplicationView = field(default_factory=ReplicationView)


@dataclass(frozen=True, kw_only=True)
class LostShardView(View):
    """A shard whose last copy is gone, and what is known of it."""

    shard_id: int
    table: str
    """Table whose rows the shard has; empty for parameters."""
    version: int
    """Highest version that the shard is known to have had; 0 if none is known."""
    lost_unix_s: float
    """Time at which the loss was found; 0 if unknown."""
    servers: tuple[str, ...]
    """Servers that held the shard last."""
    on_disk: str
    """Server whose journal has the shard; empty if no journal has it."""
    snapshot: str
    """Result of restoring the shard from a snapshot, in a sentence."""
    told: str
    """Text for people: what was lost, its highest known version, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class AcceptedLossView(View):
    """A lost shard that an operator gave up, so that it started over."""

    shard_id: int
    version: int
    """Highest version that the shard is known to have had; 0 if none is known."""
    lost_unix_s: float
    accepted_unix_s: float
    by: str
    samples_anew: bool = False
    """True if the job's samples started over with the shard."""


@dataclass(frozen=True, kw_only=True)
class ShardsView(View):
    """The shard map of a job, with the state of each shard and server."""

    servers: tuple[ServerView, ...]
    shards: tuple[ShardView, ...]
    skew: float = 1.0
    """Parameter bytes led by the fullest server, divided by the mean over all servers that are
    primaries."""
    lost: tuple[LostShardView, ...] = ()
    """Shards that no server holds any more. Their pushes and pulls are refused."""
    lost_in_words: tuple[str, ...] = ()
    """Lost shards in words, one paragraph for shards that were lost together."""
    accepted_losses: tuple[AcceptedLossView, ...] = ()
    """Last accepted loss of each shard."""


@dataclass(frozen=True, kw_only=True)
class EpochSamplesView(View):
    epoch: int
    completed: int
    in_flight: int
    returned: int


@dataclass(frozen=True, kw_only=True)
class SamplesView(View):
    """The sample ledger of a job whose members train at their own pace."""

    dataset_size: int
    num_epochs: int
    completed: int
    in_flight: int
    """Samples leased and not completed."""
    returned: int
    """Samples that lost members returned, to be leased again."""
    ignored: int
    """Samples reported as completed by members that had no lease on them."""
    repeated_max: int
    """Upper bound on the number of samples that were trained on a second time."""
    exhausted: bool
    epochs: tuple[EpochSamplesView, ...]
    """The newest epochs that have begun."""


@dataclass(frozen=True, kw_only=True)
class OutputView(View):
    """Lines that a member printed, those of its earlier processes included."""

    job: str
    member_id: str
    host: str
    """Host of its launcher."""
    is_live: bool
    """False if the launcher has ended, and sent these as its last lines."""
    lines: tuple[str, ...]
    """Lines in order, at most 64 KiB, without escape sequences."""
    before: str | None
    """Position with which to request the lines before these; null if none are kept."""
    after: str
    """Position with which to request the lines after these."""
    has_gap: bool = False
    """True if lines between the position of the request and these are no longer kept."""


@dataclass(frozen=True, kw_only=True)
class WeightReaderView(View):
    """A process that reads published weights, as it reported last."""

    reader_id: str
    version: int
    """Version that the reader has installed; 0 if none yet."""
    digest: str
    """Digest of the installed bytes, in hexadecimal digits."""
    differs: bool
    """True if the installed bytes differ from those published as this version."""
    lag_versions: int
    """Number of versions by which the reader is behind; 0 if it has installed none."""
    seen_unix_s: float
    fetch_s: float
    """Time that its last fetch took; 0 if not reported."""
    fetch_bytes: int


@dataclass(frozen=True, kw_only=True)
class PublishedVersionView(View):
    """A version of a series of published weights that is kept."""

    version: int
    step: int
    created_unix_s: float
    num_bytes: int
    num_copies: int
    """Smallest number of holders of a segment of the version."""
    digest: str
    pinned: bool
    durable: bool
    """True if the version is on its holders' disks as well."""
    rolled_back_to: int
    """Version whose bytes this rollback has; else 0."""


@dataclass(frozen=True, kw_only=True)
class PublishedSeriesView(View):
    """A series of published weights."""

    series: str
    version: int
    """Newest version; 0 if there is none yet."""
    publisher: str
    versions: tuple[PublishedVersionView, ...]
    """Kept versions, oldest first."""
    readers: tuple[WeightReaderView, ...]
    """Readers of the series, at most 200."""
    num_readers: int
    num_differing: int
    """Readers with other bytes than were published as their version."""
    lost: tuple[int, ...]
    """The newest versions that were dropped because no server holds them any more."""
    num_lost: int
    """Versions that were ever dropped for that."""


@dataclass(frozen=True, kw_only=True)
class JobDetail(View):
    """A job with its members, newest generations and samples."""

    summary: JobSummary
    min_members: int
    max_members: int
    desired_members: int
    synchronous: bool
    fields: dict[str, str]
    """Settings that all members agreed on: strategy, schema, optimizer, backend and so on."""
    members: tuple[MemberDetail, ...]
    generations: tuple[GenerationView, ...]
    """Newest first, at most 100."""
    samples: SamplesView | None
    """Null if members do not lease samples, or the ledger is not open."""
    course: CourseView = field(default_factory=CourseView)
    weights: tuple[PublishedSeriesView, ...] = ()
    """Series of weights that the job publishes."""
    run: RunOrigin | None = None
    """Command line and git commit of its script; null if unknown."""
    hyperparameters: dict[str, str] = field(default_factory=dict)
    """Agreed fields that decide what is trained, with the optimizer's settings one by one."""
