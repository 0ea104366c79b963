"""Keys of Shoal in etcd. Every key is built here and nowhere else.

Values are JSON objects in UTF-8 unless said otherwise. Job and member ids are checked when they
enter (`shoal_proto.names`), so they never contain a slash.
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
"""Series of published weights. Every parameter server watches all records under this prefix."""
SERIES_LAYOUTS = ROOT + "series_layouts/"
CLOCK = ROOT + "clock"
"""Time by the clock of the last leader, written at intervals: {"unix_s": ...}."""
SNAPSHOT_ROOTS = ROOT + "snapshot_roots"
"""Root URLs below which snapshots may be, as the leading coordinator was configured: {"urls":
[...]}."""
MAX_NUMBER_DIGITS = 15
"""Maximum number of digits of a generation number that is accepted."""


def server(server_id: str) -> str:
    """A parameter server, under its own lease: {"address", "incarnation", "leaving", ...}."""
    return SERVERS + server_id


def ended_server(server_id: str, incarnation: str) -> str:
    """Key that exists for half an hour after a parameter server's process is known to have
    ended."""
    return f"{ENDED_SERVERS}{server_id}/{incarnation}"


def last_process(server_id: str) -> str:
    """The newest process of a parameter server: {"incarnation", "pid", "boot", ...}."""
    return LAST_PROCESSES + server_id


def members(job: str) -> str:
    return f"{MEMBERS}{job}/"


def member(job: str, member_id: str) -> str:
    """A member: {"incarnation", "host", ...}.

    The key exists exactly as long as the incarnation it names is not fenced. It has no lease, so
    that it outlives coordinators: only a leader that removes the member deletes it.
    """
    return f"{MEMBERS}{job}/{member_id}"


def job_state(job: str) -> str:
    """The job's own record: bounds on the number of members, newest generation number, progress,
    and how the job ended."""
    return f"{JOBS}{job}/state"


def reset(job: str) -> str:
    """Earlier runs of a job that was reset: {"last_generation", ...}.

    Separate from the job's other keys, which may all be deleted.
    """
    return RESETS + job


def quarantined(job: str, stamp: str = "", key: str = "") -> str:
    """Key to which an unreadable record of the job is moved unchanged; without `stamp`, the prefix
    of all of them."""
    moved = f"{stamp}/{key.removeprefix(ROOT)}" if stamp else ""
    return f"{ROOT}quarantine/{job}/{moved}"


def job_prefix(job: str) -> str:
    """Prefix of a job's own keys; its members and shard assignments are elsewhere."""
    return f"{JOBS}{job}/"


def generations(job: str) -> str:
    return f"{JOBS}{job}/generations/"


def generation(job: str, number: int) -> str:
    """The decided record of one generation, with its roster as a packed StoredRoster message in
    base64. The number is zero-padded, so that key order is number order.
    """
    return f"{JOBS}{job}/generations/{number:012d}"


def generation_number(job: str, key: str) -> int | None:
    """Generation number in a key of a generation record; None if it is no such key."""
    prefix = generations(job)
    digits = key.removeprefix(prefix)
    is_number = key.startswith(prefix) and digits.isascii() and digits.isdigit()
    if not is_number or len(digits) > MAX_NUMBER_DIGITS:
        return None
    return int(digits)


def shard_map(job: str) -> str:
    """Head of the job's shard map: {"digest", "num_chunks", ...}."""
    return f"{JOBS}{job}/shards"


def shard_map_chunks(job: str, digest: str = "") -> str:
    """Prefix of the chunks of the ShardMap with that digest; without `digest`, of all chunks."""
    return f"{JOBS}{job}/shards/{digest}/" if digest else f"{JOBS}{job}/shards/"


def shard_map_chunk(job: str, digest: str, number: int) -> str:
    """A chunk of the serialized, deflated ShardMap message with that digest."""
    return f"{shard_map_chunks(job, digest)}{number:04d}"


def assignments(job: str) -> str:
    """Prefix of the job's shard assignments.

    Separate from the job's other keys: every parameter server watches all assignments.
    """
    return f"{ASSIGNMENTS}{job}/"


def assignments_head(job: str) -> str:
    """Data common to all shards of a job, as a serialized JobHoldings message."""
    return f"{ASSIGNMENTS}{job}/head"


def assignments_of_placement(job: str, placement_id: str) -> str:
    """Prefix of the assignments of one placement, by its random id. Earlier or unfinished
    placements of the job may have left assignments under other ids."""
    return f"{ASSIGNMENTS}{job}/{placement_id}/"


def shard_assignment(job: str, placement_id: str, shard_id: int) -> str:
    """Assignment of a shard, as a serialized ShardHolding message."""
    return f"{ASSIGNMENTS}{job}/{placement_id}/{shard_id:08d}"


def history(job: str) -> str:
    """Charts and changes of the job, for display: deflated JSON."""
    return f"{JOBS}{job}/history"


def lineage(job: str) -> str:
    """Random id of the job's shards, drawn at their first snapshot and at each restore: text."""
    return f"{JOBS}{job}/lineage"


def restored_from(job: str) -> str:
    """The snapshot from which the job's shards were last restored: JSON."""
    return f"{JOBS}{job}/restored_from"


def sample_ledger(job: str) -> str:
    """Sample ledger (leased and completed samples), as last written in full: JSON, deflated if
    large."""
    return f"{JOBS}{job}/samples"


def sample_deltas(job: str) -> str:
    """Prefix of the changes to the sample ledger since it was last written in full."""
    return f"{JOBS}{job}/samples/"


def sample_delta(job: str, token: str, number: int) -> str:
    """A change to the sample ledger that was written in full with this token, in a binary format of
    its own. Numbers count from 0."""
    return f"{JOBS}{job}/samples/{token}/{number:06d}"


def series_head(series: str) -> str:
    """Head of a series `JOB/NAME`: a serialized SeriesHead message, which decides which versions
    the series has."""
    return f"{SERIES}{series}/head"


def series_version(series: str, number: int) -> str:
    """A version that the head names, as a serialized VersionRecord message. The number is
    zero-padded, so that key order is number order.
    """
    return f"{SERIES}{series}/versions/{number:015d}"


def series_layouts(series: str, digest: str = "") -> str:
    """Prefix of the chunks of the Layout with that digest; without `digest`, of all chunks.

    Separate from the series' other records, which every parameter server watches.
    """
    return f"{SERIES_LAYOUTS}{series}/{digest}/" if digest else f"{SERIES_LAYOUTS}{series}/"


def series_layout_chunk(series: str, digest: str, number: int) -> str:
    """A chunk of a serialized, deflated Layout message."""
    return f"{series_layouts(series, digest)}{number:04d}"
