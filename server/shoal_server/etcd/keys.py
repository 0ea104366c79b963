"""Where things lie in etcd. Every key of Shoal is built here and nowhere else.

Values are JSON objects in UTF-8 unless said otherwise. Job and member ids are checked when they
enter (`shoal_proto.names`), so they never hold a slash.
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
"""Series of published weights, all of whose records every parameter server watches."""
SERIES_LAYOUTS = ROOT + "series_layouts/"
CLOCK = ROOT + "clock"
"""What time it was when somebody led last: {"unix_s": ...}."""
SNAPSHOT_ROOTS = ROOT + "snapshot_roots"
"""Below which URLs snapshots may lie, as the leading coordinator was told: {"urls": [...]}."""
MAX_NUMBER_DIGITS = 15
"""No job comes to a generation with more."""


def server(server_id: str) -> str:
    """A parameter server, under its own lease: {"address", "incarnation", "leaving", ...}."""
    return SERVERS + server_id


def ended_server(server_id: str, incarnation: str) -> str:
    """There while a parameter server's process is known to have ended, for some minutes."""
    return f"{ENDED_SERVERS}{server_id}/{incarnation}"


def last_process(server_id: str) -> str:
    """The newest process of a parameter server: {"incarnation", "pid", "boot", ...}."""
    return LAST_PROCESSES + server_id


def members(job: str) -> str:
    return f"{MEMBERS}{job}/"


def member(job: str, member_id: str) -> str:
    """A member: {"incarnation", "host", ...}.

    The key is there exactly as long as the incarnation it names is not fenced. It is under no
    lease: no absence of a coordinator ends it, only a leader that removes the member.
    """
    return f"{MEMBERS}{job}/{member_id}"


def job_state(job: str) -> str:
    """Phase, bounds and newest generation number of a job."""
    return f"{JOBS}{job}/state"


def reset(job: str) -> str:
    """What is remembered of a job whose records were taken away: {"last_generation", ...}.

    Apart from the job's other keys: there may be none of them.
    """
    return RESETS + job


def quarantined(job: str, stamp: str = "", key: str = "") -> str:
    """Where a record of the job that could not be read is moved to, as it was; or all of them."""
    moved = f"{stamp}/{key.removeprefix(ROOT)}" if stamp else ""
    return f"{ROOT}quarantine/{job}/{moved}"


def job_prefix(job: str) -> str:
    """All of a job's own keys, its members and who holds its shards not among them."""
    return f"{JOBS}{job}/"


def generations(job: str) -> str:
    return f"{JOBS}{job}/generations/"


def generation(job: str, number: int) -> str:
    """The decided record of one generation. Zero-padded, so that key order is number order.

    Of more than 500 members: {"format": 2, "generation": a StoredGeneration message in base64}.
    """
    return f"{JOBS}{job}/generations/{number:012d}"


def generation_number(job: str, key: str) -> int | None:
    """Of which generation of the job the key has the record; None if it is no such key."""
    prefix = generations(job)
    digits = key.removeprefix(prefix)
    is_number = key.startswith(prefix) and digits.isascii() and digits.isdigit()
    if not is_number or len(digits) > MAX_NUMBER_DIGITS:
        return None
    return int(digits)


def shard_map(job: str) -> str:
    """Which ShardMap is the job's: {"digest", "num_chunks", ...}."""
    return f"{JOBS}{job}/shards"


def shard_map_chunks(job: str, digest: str = "") -> str:
    """The parts of the ShardMap of that digest, or of any."""
    return f"{JOBS}{job}/shards/{digest}/" if digest else f"{JOBS}{job}/shards/"


def shard_map_chunk(job: str, digest: str, number: int) -> str:
    """A part of the ShardMap, as a serialized protobuf message, of that digest."""
    return f"{shard_map_chunks(job, digest)}{number:04d}"


def assignments(job: str) -> str:
    """All that tells who holds the job's shards.

    Apart from the job's other keys: every parameter server watches all of these.
    """
    return f"{ASSIGNMENTS}{job}/"


def assignments_head(job: str) -> str:
    """What belongs to all the shards of a job, as a serialized JobHoldings message."""
    return f"{ASSIGNMENTS}{job}/head"


def assignments_of_run(job: str, run: str) -> str:
    """Those of one run: what another run of the job, or a placement that came to no end, left
    beside them is known by its key."""
    return f"{ASSIGNMENTS}{job}/{run}/"


def shard_assignment(job: str, run: str, shard_id: int) -> str:
    """Who holds a shard, as a serialized ShardHolding message."""
    return f"{ASSIGNMENTS}{job}/{run}/{shard_id:08d}"


def history(job: str) -> str:
    """Its charts and changes, for people: deflated JSON."""
    return f"{JOBS}{job}/history"


def lineage(job: str) -> str:
    """Drawn when the job's first snapshot is taken and whenever it is restored: text."""
    return f"{JOBS}{job}/lineage"


def restored_from(job: str) -> str:
    """The snapshot that its shards were restored from last: JSON."""
    return f"{JOBS}{job}/restored_from"


def sample_ledger(job: str) -> str:
    """Which samples were leased and completed, as of when that was last written whole."""
    return f"{JOBS}{job}/samples"


def sample_deltas(job: str) -> str:
    """What the sample ledger has become since."""
    return f"{JOBS}{job}/samples/"


def sample_delta(job: str, token: str, number: int) -> str:
    """One step of that, of the ledger whose token it is, in bytes of its own format; from 0."""
    return f"{JOBS}{job}/samples/{token}/{number:06d}"


def series_of_job(job: str) -> str:
    """All records of the series of a job."""
    return f"{SERIES}{job}/"


def series_head(series: str) -> str:
    """What decides which versions a series `JOB/NAME` has, as a serialized SeriesHead message."""
    return f"{SERIES}{series}/head"


def series_version(series: str, number: int) -> str:
    """A version that the head names, as a serialized VersionRecord message. Zero-padded, so that
    key order is number order."""
    return f"{SERIES}{series}/versions/{number:015d}"


def series_layouts_of_job(job: str) -> str:
    """The layouts of all series of a job."""
    return f"{SERIES_LAYOUTS}{job}/"


def series_layouts(series: str, digest: str = "") -> str:
    """The chunks of the Layout of that digest, or of any.

    Apart from the series' records: every parameter server watches those.
    """
    return f"{SERIES_LAYOUTS}{series}/{digest}/" if digest else f"{SERIES_LAYOUTS}{series}/"


def series_layout_chunk(series: str, digest: str, number: int) -> str:
    """A part of a serialized Layout message, deflated."""
    return f"{series_layouts(series, digest)}{number:04d}"
