"""Data that the HTTP API shows. The OpenAPI text of each field is the sentence under it.

Times are Unix seconds. A list is never longer than its owner keeps: 100 generations a job, the
newest 1000 events a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from shoal_proto.health import HealthFigures

STATES = (
    *("running", "waiting", "interrupted", "finished", "failed", "stopped", "lost"),
    "quarantined",
)
"""Of a job, from its first member on."""
OVER = frozenset({"finished", "failed", "stopped", "lost"})
"""True if the job takes no members until an operator allows joins again."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Base of all views: field texts come from the source, NaN and infinity travel as text."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )


@dataclass(frozen=True, kw_only=True)
class Readiness(View):
    """Readiness of this coordinator, with the reason if it does not serve."""

    ready: bool
    """True while this coordinator leads and reaches etcd."""
    reason: str
    """Why it is, or is not, ready."""
    leader: str = ""
    """host:port of the coordinator that leads, as far as this one knows."""


@dataclass(frozen=True, kw_only=True)
class ProcessView(View):
    """The process that a member is: where it runs, and on what."""

    host: str = ""
    pid: int = 0
    address: str = ""
    """IP address under which peers reach it."""
    device: str = ""
    torch_version: str = ""
    shoal_version: str = ""


@dataclass(frozen=True, kw_only=True)
class MemberView(View):
    """A member, as the coordinator knows it from its stream and heartbeats."""

    member_id: str
    public_id: str
    """Tells this process start from others of the same member: 16 hexadecimal digits."""
    state: str
    """joining, waiting, standby, preparing, bringing-up, ready, training, paused, settling,
    draining, halted or disconnected."""
    waiting_for: str
    """What the member waits for, in words."""
    waiting_since_unix_s: float
    rank: int | None = None
    """Rank in the generation that runs or is brought up; null outside of it."""
    generation: int = 0
    """The generation it is part of; 0 outside of any."""
    process: ProcessView = field(default_factory=ProcessView)
    step: int = 0
    """Optimizer steps, as of its last heartbeat or proposal."""
    clock: int | None = None
    """The round that it trains in; null where no bound is put on staleness."""
    joined_unix_s: float = 0.0
    last_seen_unix_s: float = 0.0
    """Its last sign of life."""


@dataclass(frozen=True, kw_only=True)
class RosterEntryView(View):
    """One place in a generation's roster."""

    member_id: str
    public_id: str
    rank: int
    host: str = ""
    address: str = ""
    state_action: str = ""
    """initial, keep, receive or checkpoint: where the member's training state comes from."""


@dataclass(frozen=True, kw_only=True)
class ConflictView(View):
    """A field in which members differed."""

    field: str
    values: Mapping[str, tuple[str, ...]]
    """Each value that was seen, and the members that hold it."""


@dataclass(frozen=True, kw_only=True)
class GenerationView(View):
    """End of one attempt to form a generation: the record that every member got."""

    generation: int
    verdict: str
    """committed or aborted."""
    reason: str
    decided_unix_s: float
    members: tuple[RosterEntryView, ...]
    """The roster, by rank."""
    source_member_id: str = ""
    """The member whose state the others take."""
    step: int = 0
    """The step the source stood at when the roster was drawn up: where the generation starts,
    unless it is planned."""
    planned: bool = False
    """True when the previous generation trained on while this one was agreed; it starts where that
    one stops, which the event boundary_agreed tells."""
    digest: str = ""
    """SHA-256 of the roster that all accepted."""
    conflicts: tuple[ConflictView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LifeView(View):
    """Figures of a job's whole life."""

    begun_unix_s: float = 0.0
    """When its first member came."""
    ended_unix_s: float = 0.0
    """When it was over; 0 while it is not."""
    step: int = 0
    """The highest step that is known of a synchronous generation, or of a job that is over."""
    num_restarts: int = 0
    """How often training was interrupted, because a member was lost or a collective failed."""
    loss: float | None = None
    """Of a job that is over: the one that was reported last, as its record has it."""
    num_samples: int | None = None
    """Of a job that is over, as its record has it."""
    idle_s: float = 0.0
    """For how long nobody trained, because no generation ran."""


@dataclass(frozen=True, kw_only=True)
class JobView(View):
    """A job with its members and its newest generations: all that the coordinator has to tell."""

    job: str
    phase: str
    """collect, prepare, committed, running, aborted, finished, lost (nobody holds the state that
    it had come to) or quarantined (what etcd holds of it cannot be used)."""
    reason: str
    """Why the job is in this phase."""
    since_unix_s: float
    """When it entered the phase."""
    min_members: int
    max_members: int
    desired_members: int
    life: LifeView = field(default_factory=LifeView)
    state: str = "running"
    """running (it has members), waiting (no member has come yet), interrupted (it has trained, and
    has no members now: some may come and go on), finished, failed (all its members went and
    none came back), stopped (by an operator), lost or quarantined (what etcd holds of it cannot be
    used)."""
    generation: int = 0
    """The newest generation number; 0 before the first."""
    synchronous: bool = True
    fields: Mapping[str, str] = field(default_factory=dict)
    """What all members agreed on: strategy, schema, optimizer, backend and so on."""
    members: tuple[MemberView, ...] = ()
    generations: tuple[GenerationView, ...] = ()
    """Newest first, at most 100."""


FIGURES: Mapping[str, str] = {
    name: figure["description"]
    for name, figure in TypeAdapter(HealthFigures).json_schema()["properties"].items()
}
"""What each figure of a health report means."""


def describe_figures(schema: dict[str, Any]) -> None:
    """Say in a schema what its figures mean: pydantic knows the texts of a class's own fields."""
    for name, text in FIGURES.items():
        schema["properties"][name]["description"] = text


@dataclass(frozen=True, kw_only=True)
class HealthView(HealthFigures, View):
    """A member's last health report. A figure is null where it did not say."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        **View.__pydantic_config__, json_schema_extra=describe_figures
    )

    public_id: str
    """The process start that reported."""
    received_unix_s: float


@dataclass(frozen=True, kw_only=True)
class EventView(View):
    """Something that happened, in words."""

    id: int
    """Rises from event to event, over restarts of the coordinator too."""
    unix_s: float
    kind: str
    """In the past tense, as in the log: generation_committed, member_lost ..."""
    reason: str
    member_id: str = ""
    generation: int = 0
    detail: bool = False
    """Whether it is a step on the way to what another event tells in one line."""


@dataclass(frozen=True, kw_only=True)
class FullPeerView(View):
    """A server that has no memory for copies that another one wants to keep there."""

    server_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoopLagView(View):
    """Lag of a server's event loop in the last ten seconds."""

    p99_s: float = 0.0
    """99th percentile."""
    max_s: float = 0.0
    """The longest."""


@dataclass(frozen=True, kw_only=True)
class ComparedPiecesView(View):
    """Pieces of copies kept here, compared with their primaries' since the server started."""

    same: int = 0
    different: int = 0
    """The copies were dropped, and are made anew."""


@dataclass(frozen=True, kw_only=True)
class ServerView(View):
    """A parameter server, and whether it answers."""

    server_id: str
    address: str
    state: str
    """serving, unreachable (registered but silent), or gone (its lease ran out)."""
    error: str = ""
    memory_bytes: int = 0
    """Values and optimizer state of the job, of copies too."""
    num_copies: int = 0
    """Shards of the job that it keeps a copy of."""
    unfinished_bytes: int = 0
    """Data of pushes that it received and has not applied yet, of all jobs."""
    refused_by_epoch: int = 0
    """Parts of pushes that came by an outdated shard map; their senders have sent them again."""
    partial_pushes: int = 0
    """Pushes of which some shards were applied here and others refused, to be sent again."""
    held_bytes: int = 0
    """Values and optimizer state, of copies too, and unfinished data, of all jobs."""
    memory_limit_bytes: int = 0
    """Of held_bytes: beyond it no shard is created, no copy taken and no table grows."""
    torch_version: str = ""
    """What it computes with; empty for one that does not say, or is not registered."""
    loop_lag: LoopLagView = field(default_factory=LoopLagView)
    compared: ComparedPiecesView = field(default_factory=ComparedPiecesView)
    full_peers: tuple[FullPeerView, ...] = ()
    """Servers that have no memory for copies of what this one leads; it goes on without them."""


@dataclass(frozen=True, kw_only=True)
class CopyView(View):
    """A server that keeps a copy of a shard."""

    server_id: str
    version: int
    """The newest that it is known to have."""
    joining: bool = False
    """It is still being brought in step."""


@dataclass(frozen=True, kw_only=True)
class PushesView(View):
    """Outcomes of the pushes to a shard since its server has it."""

    applied: int = 0
    applied_bytes: int = 0
    """Bytes of the pushes applied since this server leads the shard."""
    duplicates: int = 0
    """Pushes that were retries: answered, not applied again."""
    refused: int = 0
    staleness_counts: tuple[int, ...] = ()
    """staleness_counts[i]: pushes of staleness i; the last holds all above."""


@dataclass(frozen=True, kw_only=True)
class ReplicationView(View):
    """Replicas of a shard, and how far behind they are."""

    copies: tuple[CopyView, ...] = ()
    lag: int = 0
    """Updates that the copy furthest behind has not received; of those in step."""
    unreplicated_bytes: int = 0
    """Data of pushes on their way to a copy."""


@dataclass(frozen=True, kw_only=True)
class ShardView(View):
    """One shard: where it lies and what was done to it. Counts are 0 while its server is silent."""

    shard_id: int
    server_id: str
    """Its primary."""
    epoch: int
    """Number of times its primary has changed."""
    dtype: str
    num_elements: int
    parameters: tuple[str, ...]
    """The parameters it holds blocks of."""
    created: bool = False
    """Whether the server holds values for it."""
    version: int = 0
    """Updates applied."""
    num_bytes: int = 0
    pushes: PushesView = field(default_factory=PushesView)
    replication: ReplicationView = field(default_factory=ReplicationView)


@dataclass(frozen=True, kw_only=True)
class LostShardView(View):
    """A shard whose last copy is gone, and what is known of it."""

    shard_id: int
    table: str
    """The table that it has rows of; empty for parameters."""
    version: int
    """It had at least this one; 0: of none is known."""
    lost_unix_s: float
    """When it was found to be lost; 0: not known."""
    servers: tuple[str, ...]
    """That had it last."""
    on_disk: str
    """The server whose journal has it; empty: none has."""
    snapshot: str
    """What became of bringing it back from a snapshot, in a sentence."""
    told: str
    """All of this, and what would bring it back, in words."""


@dataclass(frozen=True, kw_only=True)
class AcceptedLossView(View):
    """A shard that was lost and that an operator gave up, so that it began anew."""

    shard_id: int
    version: int
    """It had had at least this one; 0: of none is known."""
    lost_unix_s: float
    accepted_unix_s: float
    by: str
    samples_anew: bool = False
    """Whether the samples of the job began anew with it; else they stayed counted."""


@dataclass(frozen=True, kw_only=True)
class ShardsView(View):
    """The shard map of a job, with the state of each shard and server."""

    servers: tuple[ServerView, ...]
    shards: tuple[ShardView, ...]
    skew: float = 1.0
    """Parameter bytes of the server that leads most of them, to the mean over the servers."""
    lost: tuple[LostShardView, ...] = ()
    """Shards that nobody has any more. Pushes and pulls of them are refused."""
    lost_in_words: tuple[str, ...] = ()
    """The same, a paragraph for all that went together."""
    accepted_losses: tuple[AcceptedLossView, ...] = ()
    """Of each shard the last loss that was accepted."""


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
    """Leased to members that still work at them."""
    returned: int
    """Given back by lost members and leased again."""
    ignored: int
    """Reported as completed by who did not hold them."""
    repeated_max: int
    """No more samples than this were trained on a second time."""
    exhausted: bool
    epochs: tuple[EpochSamplesView, ...]
    """The newest epochs that have begun."""


@dataclass(frozen=True, kw_only=True)
class OutputView(View):
    """Some of the lines that a member printed, over the restarts of its process."""

    job: str
    member_id: str
    host: str
    """Where its launcher runs."""
    is_live: bool
    """False: the launcher has ended, and these are the last lines that it left."""
    lines: tuple[str, ...]
    """In order, at most 64 KiB of them, without escape sequences of terminals."""
    before: str | None
    """Ask with this for the lines before these; null: no older ones are kept."""
    after: str
    """Ask with this for the lines that came since."""
    has_gap: bool = False
    """Lines between those before `after` of the request and these are not kept any more."""


@dataclass(frozen=True, kw_only=True)
class WeightReaderView(View):
    """A process that reads published weights, as it reported last."""

    reader_id: str
    version: int
    """The version that it has installed; 0: none yet."""
    digest: str
    """Of the bytes that it has installed, in hexadecimal digits."""
    differs: bool
    """True if those are not the bytes that were published as that version."""
    lag_versions: int
    """The newest version less its own; 0 if it has none yet."""
    seen_unix_s: float
    fetch_s: float
    """The time that its last fetch took; 0: it has not said."""
    fetch_bytes: int


@dataclass(frozen=True, kw_only=True)
class PublishedVersionView(View):
    """A version of a series of published weights that is kept."""

    version: int
    step: int
    created_unix_s: float
    num_bytes: int
    num_copies: int
    """Servers that are to hold it: of its segments, the one with the fewest."""
    digest: str
    pinned: bool
    durable: bool
    """Also on the disks of those servers."""
    rolled_back_to: int
    """The version whose bytes it has, if it is a rollback; else 0."""


@dataclass(frozen=True, kw_only=True)
class PublishedSeriesView(View):
    """A series of published weights."""

    series: str
    version: int
    """The newest one; 0: none yet."""
    publisher: str
    versions: tuple[PublishedVersionView, ...]
    """Those that are kept, oldest first."""
    readers: tuple[WeightReaderView, ...]
    """At most 200."""
    num_readers: int
    num_differing: int
    """Readers that serve other bytes than were published as their version."""
    lost: tuple[int, ...]
    """Versions that were dropped because no server had them any more."""
