"""Bounds of every field of every request: by message and name in `OF_MESSAGE`, else by name in
`NAMED`. A test fails for a field that is in neither table."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_proto import MAX_MESSAGE_BYTES
from shoal_proto.listings import MAX_LISTING_BYTES
from shoal_proto.names import MAX_NAME_LENGTH
from shoal_proto.secrets import MAX_LENGTH
from shoal_server.core.publications.limits import MAX_COPIES, MAX_KEEP, MAX_WORLD

MAX_SECONDS = 1e10
"""Bound of three centuries; each service bounds its waits far below."""
EXACT = 2**53 - 1
"""Largest integer that JSON keeps exactly."""
MAX_MEMBERS = 2**31 - 1
MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bounds of one value. Bounds that do not apply to its type are ignored."""

    length: int = 0
    """Maximum length of a text in characters, or of bytes."""
    most: int | None = None
    """Maximum of a whole number from 0; None: any number of its type."""
    seconds: bool = False
    """True for seconds from 0 to MAX_SECONDS."""
    count: int = 1 << 20


def text(length: int, count: int = 1 << 20) -> Bound:
    return Bound(length=length, count=count)


def whole(most: int, count: int = 1 << 20) -> Bound:
    return Bound(most=most, count=count)


NAME = text(MAX_NAME_LENGTH)
HOST = text(255)
WORD = text(100)
SENTENCES = text(4096)
DIGEST = text(128)
SERIES = text(2 * MAX_NAME_LENGTH + 1)
CONTENT = Bound(length=64)
PATH = text(4096)
DATA = Bound(length=MAX_MESSAGE_BYTES)
COUNTED = whole(EXACT)
ANY = Bound()
"""Any value of its type: numbers of 32 bits, hashes, random ids."""
REAL = Bound()
SECONDS = Bound(seconds=True)


def some(count: int) -> Bound:
    """Bound of a list or map of messages."""
    return Bound(count=count)


NAMED: Mapping[str, Bound] = {
    # identities
    "job": NAME,
    "member_id": NAME,
    "server_id": NAME,
    "incarnation": text(64),
    "run": text(64),
    "job_secret": text(MAX_LENGTH),
    "launch_secret": text(MAX_LENGTH),
    "launch_digest": DIGEST,
    "ticket": text(64),
    "source": text(64),
    "public_id": text(64),
    "session": text(512),
    "traceparent": text(64),
    "forgotten_sessions": text(512),
    "ended_sessions": text(512),
    "host": HOST,
    "address": HOST,
    "device": WORD,
    "torch_version": WORD,
    "shoal_version": WORD,
    "pid": ANY,
    "exit_code": ANY,
    "protocol": ANY,
    "oldest_protocol": ANY,
    "num_devices": ANY,
    "probe_port": whole(MAX_PORT),
    "min_members": whole(MAX_MEMBERS),
    "max_members": whole(MAX_MEMBERS),
    "desired_members": whole(MAX_MEMBERS),
    "enough_for_call": whole(MAX_MEMBERS),
    # texts and names
    "reason": SENTENCES,
    "error": SENTENCES,
    "failure": SENTENCES,
    "seen": SENTENCES,
    "expected": SENTENCES,
    "field": text(256),
    "by": text(256),
    "digest": DIGEST,
    "sha256": DIGEST,
    "kind": WORD,
    "dtype": WORD,
    "part": WORD,
    "name": text(4096),
    "table": NAME,
    "parameter": text(4096),
    "url": PATH,
    "file": PATH,
    "cut_id": NAME,
    "key": text(4096),
    "keys": text(4096),
    "series": SERIES,
    "reader": NAME,
    "holders": text(MAX_NAME_LENGTH, count=64),
    "layout_digest": CONTENT,
    "tables_cut": Bound(length=1 << 18),
    "installed_digest": CONTENT,
    "serves_at": HOST,
    # counters
    "world": whole(MAX_WORLD),
    "publication": COUNTED,
    "installed": COUNTED,
    "leased": whole(EXACT, count=256),
    "to": COUNTED,
    "generation": COUNTED,
    "step": COUNTED,
    "next_step": COUNTED,
    "checkpoint_steps": COUNTED,
    "clock": COUNTED,
    "bound": COUNTED,
    "sequence": COUNTED,
    "version": COUNTED,
    "base_version": COUNTED,
    "known_version": COUNTED,
    "staleness": COUNTED,
    "table_step": COUNTED,
    "epoch": COUNTED,
    "base_epoch": COUNTED,
    "first_epoch": COUNTED,
    "number": COUNTED,
    "num_epochs": COUNTED,
    "num_samples": COUNTED,
    "step_samples": COUNTED,
    "reserve_samples": COUNTED,
    "begun_samples": COUNTED,
    "begins_samples_per_s": COUNTED,
    "dataset_size": COUNTED,
    "start": COUNTED,
    "stop": COUNTED,
    "moved": ANY,
    "pause_number": ANY,
    "amount": ANY,
    "call_id": ANY,
    # sizes
    "num_bytes": COUNTED,
    "chunk_bytes": COUNTED,
    "rest_bytes": COUNTED,
    "offset_bytes": COUNTED,
    "offset": COUNTED,
    "oldest": COUNTED,
    "num_elements": COUNTED,
    "num_rows": COUNTED,
    "max_rows": COUNTED,
    "max_shard_bytes": COUNTED,
    "num_chunks": COUNTED,
    "num_shards": COUNTED,
    "min_pushes": COUNTED,
    "shape": whole(EXACT, count=64),
    "dim": ANY,
    "group": ANY,
    "block": ANY,
    "rank": ANY,
    "matrix": ANY,
    "lead": COUNTED,
    "rows": COUNTED,
    "columns": COUNTED,
    "blocks": ANY,
    "absent_blocks": ANY,
    "fetch_bytes": COUNTED,
    "segment_bytes": whole(EXACT, count=MAX_WORLD),
    "sizes": whole(EXACT, count=64),
    "offsets": whole(EXACT, count=64),
    "at": COUNTED,
    "element_bytes": whole(16),
    "keep": whole(MAX_KEEP),
    "copies": whole(MAX_COPIES),
    # indexes and ids
    "tensor": ANY,
    "segment": ANY,
    "shard_id": ANY,
    "shard_ids": ANY,
    "all_shard_ids": ANY,
    "table_index": ANY,
    "index": ANY,
    "image": ANY,
    "born": ANY,
    "next_chunk": ANY,
    "link": ANY,
    "seed": ANY,
    "checksum": ANY,
    # data
    "data": DATA,
    "value": DATA,
    "desired": DATA,
    "spec": DATA,
    "shard_bits": DATA,
    "row_ids": DATA,
    "row_births": DATA,
    # seconds
    "wait_s": SECONDS,
    "timeout_s": SECONDS,
    "limit_s": SECONDS,
    "elapsed_s": SECONDS,
    "own_code_s": SECONDS,
    "last_call_s": SECONDS,
    "max_idle_s": SECONDS,
    "fetch_s": SECONDS,
    "at_unix_s": SECONDS,
    # optimizers
    "lr": REAL,
    "weight_decay": REAL,
    "momentum": REAL,
    "dampening": REAL,
    "beta1": REAL,
    "beta2": REAL,
    "eps": REAL,
    "lr_decay": REAL,
    "initial_accumulator_value": REAL,
    "initial_accumulator": REAL,
    "center": REAL,
    "spread": REAL,
    "probability": REAL,
    "strength": REAL,
    "decay": REAL,
    "gamma": REAL,
    "factor": REAL,
    "start_factor": REAL,
    "end_factor": REAL,
    "eta_min": REAL,
    "t_max": COUNTED,
    "total_iters": COUNTED,
    "num_updates": COUNTED,
    "step_size": COUNTED,
    "milestones": COUNTED,
    # lists of messages
    "beats": some(1 << 14),
    "members": some(1 << 14),
    "last": some(1 << 14),
    "rejections": some(256),
    "unreachable": some(1 << 14),
    "completed": some(1 << 20),
    "held": some(1 << 20),
    "completed_before": some(1 << 20),
    "given_back": some(1 << 20),
    "pairs": some(1 << 16),
    "parameters": some(1 << 20),
    "tables": some(1 << 10),
    "shards": some(1 << 17),
    "begun": some(1 << 16),
    "steps": some(1 << 16),
    "known": some(1 << 20),
    "files": some(1 << 17),
    "items": some(1 << 17),
    "groups": some(1 << 12),
    "phases": some(1 << 10),
    "low_rank": some(1 << 17),
    "tensors": some(1 << 12),
    "slices": some(1 << 17),
    "segments": some(MAX_WORLD),
    "cut_parts": some(MAX_WORLD),
    "elements": some(1 << 17),
    "metadata": some(64),
    "chain": some(64),
    "chunks": some(1 << 12),
}

OF_MESSAGE: Mapping[str, Bound] = {
    "Proposal.fields": some(256),
    "Proposal.optional_fields": some(256),
    "Proposal.listings": some(8),
    "FieldsEntry.key": text(256),
    "FieldsEntry.value": SENTENCES,
    "OptionalFieldsEntry.key": text(256),
    "OptionalFieldsEntry.value": SENTENCES,
    "ListingsEntry.key": text(256),
    "ListingsEntry.value": Bound(length=MAX_LISTING_BYTES),
    "StoreGetRequest.keys": text(4096, count=1 << 16),
    "StoreKeysRequest.keys": text(4096, count=1 << 16),
    "StoreCompareSetRequest.expected": DATA,
    "Shard.blocks": some(1 << 20),
    "StepPhase.step_size": COUNTED,
    "OutputPart.data": Bound(length=1 << 18),
    "Layout.tensors": some(1 << 17),
    "MetadataEntry.key": text(256),
    "MetadataEntry.value": SENTENCES,
    # Members of released versions send the nanoseconds since their host's boot.
    "LeaseRequest.sequence": ANY,
    "HoldsSegmentsRequest.digests": Bound(length=64, count=1 << 16),
    "StoreServer.id": NAME,
    "DifferenceRequest.base": CONTENT,
    "DifferenceRequest.target": CONTENT,
    "PutSegmentRequest.abandoned": whole(EXACT, count=1 << 10),
    "PutSegmentRequest.chunk_digests": Bound(length=1 << 22),
}


MESSAGES: Mapping[str, int] = {"Proposal": 128 * 1024}


def bound_of(message: str, field: str) -> Bound | None:
    """Bound of a field; None if it has none."""
    return OF_MESSAGE.get(f"{message}.{field}") or NAMED.get(field)
