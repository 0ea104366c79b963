"""Keys of Shoal in etcd, all built here.

Values are JSON objects in UTF-8 unless said otherwise. Job and member ids have passed
`shoal_proto.names`, so they contain no slash.
"""

ROOT = "/shoal/v1/"
LEADER = ROOT + "leader"
SERVERS = ROOT + "servers/"
MEMBERS = ROOT + "members/"
JOBS = ROOT + "jobs/"
ASSIGNMENTS = ROOT + "assignments/"
RESETS = ROOT + "resets/"
ENDED_SERVERS = ROOT + "ended_servers/"
LAST_PROCESSES = ROOT + "last_processes/"
SERIES = ROOT + "series/"
"""Series of published weights, all watched by every parameter server."""
SERIES_LAYOUTS = ROOT + "series_layouts/"
CLOCK = ROOT + "clock"
"""Time by the last leader's clock, written at intervals: {"unix_s": ...}."""
SNAPSHOT_ROOTS = ROOT + "snapshot_roots"
"""URLs below which snapshots may be, by the leading coordinator's options: {"urls": [...]}."""
MAX_NUMBER_DIGITS = 15


def server(server_id: str) -> str:
    """A parameter server, under its lease: {"address", "incarnation", "leaving", ...}."""
    return SERVERS + server_id


def ended_server(server_id: str, incarnation: str) -> str:
    """Exists for half an hour after a server process is known to have ended."""
    return f"{ENDED_SERVERS}{server_id}/{incarnation}"


def last_process(server_id: str) -> str:
    """A server's newest process: {"incarnation", "pid", "boot", ...}."""
    return LAST_PROCESSES + server_id


def members(job: str) -> str:
    return f"{MEMBERS}{job}/"


def member(job: str, member_id: str) -> str:
    """A member: {"incarnation", "host", ...}.

    The key exists exactly as long as its incarnation is not fenced. It has no lease, so that it
    outlives coordinators: only a leader deletes the key.
    """
    return f"{MEMBERS}{job}/{member_id}"


def job_state(job: str) -> str:
    """The job's own record: bounds on members, newest generation, progress, and outcome."""
    return f"{JOBS}{job}/state"


def reset(job: str) -> str:
    """Earlier runs of a job that was reset: {"last_generation", ...}.

    It remains when the job's other keys are deleted.
    """
    return RESETS + job


def quarantined(job: str, stamp: str = "", key: str = "") -> str:
    """Key to which an unreadable record is moved unchanged; without `stamp`, the prefix of all such
    keys."""
    moved = f"{stamp}/{key.removeprefix(ROOT)}" if stamp else ""
    return f"{ROOT}quarantine/{job}/{moved}"


def job_prefix(job: str) -> str:
    """Prefix of a job's own keys, without its members and shard assignments."""
    return f"{JOBS}{job}/"


def generations(job: str) -> str:
    return f"{JOBS}{job}/generations/"


def generation(job: str, number: int) -> str:
    """The decided record of a generation, with a packed StoredRoster message in base64.
    Zero-padded, so that key order is number order."""
    return f"{JOBS}{job}/generations/{number:012d}"


def generation_number(job: str, key: str) -> int | None:
    """Number in a generation's key; None for another key."""
    prefix = generations(job)
    digits = key.removeprefix(prefix)
    is_number = key.startswith(prefix) and digits.isascii() and digits.isdigit()
    if not is_number or len(digits) > MAX_NUMBER_DIGITS:
        return None
    return int(digits)


def shard_map(job: str) -> str:
    """Head of the shard map: {"digest", "num_chunks", ...}."""
    return f"{JOBS}{job}/shards"


def shard_map_chunks(job: str, digest: str = "") -> str:
    """Prefix of a ShardMap's chunks; without `digest`, of all chunks."""
    return f"{JOBS}{job}/shards/{digest}/" if digest else f"{JOBS}{job}/shards/"


def shard_map_chunk(job: str, digest: str, number: int) -> str:
    return f"{shard_map_chunks(job, digest)}{number:04d}"


def assignments(job: str) -> str:
    """Prefix of the job's shard assignments.

    It is apart from the job's other keys, since every parameter server watches all assignments.
    """
    return f"{ASSIGNMENTS}{job}/"


def assignments_head(job: str) -> str:
    """Data common to all shards of a job: a serialized JobHoldings message."""
    return f"{ASSIGNMENTS}{job}/head"


def assignments_of_placement(job: str, placement_id: str) -> str:
    """Prefix of one placement's assignments. Earlier or unfinished placements may have left other
    assignments."""
    return f"{ASSIGNMENTS}{job}/{placement_id}/"


def shard_assignment(job: str, placement_id: str, shard_id: int) -> str:
    """A shard's assignment: a serialized ShardHolding message."""
    return f"{ASSIGNMENTS}{job}/{placement_id}/{shard_id:08d}"


def history(job: str) -> str:
    """Charts and changes of the job: deflated JSON."""
    return f"{JOBS}{job}/history"


def lineage(job: str) -> str:
    """Random id of the job's shards, drawn at the first cut and at each restore: text."""
    return f"{JOBS}{job}/lineage"


def restored_from(job: str) -> str:
    """The snapshot of the last restore: JSON."""
    return f"{JOBS}{job}/restored_from"


def sample_ledger(job: str) -> str:
    """The sample ledger as last written in full: JSON, deflated if large."""
    return f"{JOBS}{job}/samples"


def sample_deltas(job: str) -> str:
    """Prefix of later changes to the sample ledger."""
    return f"{JOBS}{job}/samples/"


def sample_delta(job: str, token: str, number: int) -> str:
    """A change to the ledger that was written with this token, in a binary format. Numbers count
    from 0."""
    return f"{JOBS}{job}/samples/{token}/{number:06d}"


def series_head(series: str) -> str:
    """Head of a series `JOB/NAME`, which decides what versions exist: a serialized SeriesHead
    message."""
    return f"{SERIES}{series}/head"


def series_version(series: str, number: int) -> str:
    """A version: a serialized VersionRecord message. Zero-padded, so that key order is number
    order."""
    return f"{SERIES}{series}/versions/{number:015d}"


def series_layouts(series: str, digest: str = "") -> str:
    """Prefix of a Layout's chunks; without `digest`, of all chunks.

    It is apart from the series' other records, which every parameter server watches.
    """
    return f"{SERIES_LAYOUTS}{series}/{digest}/" if digest else f"{SERIES_LAYOUTS}{series}/"


def series_layout_chunk(series: str, digest: str, number: int) -> str:
    return f"{series_layouts(series, digest)}{number:04d}"
