"""A run of the fuzzer, short in the checks and of minutes at night, and its earlier findings."""

import asyncio
import hashlib
import json
import random
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fuzzing.calls import CallFuzzer, all_calls
from fuzzing.campaign import run, tell
from fuzzing.cluster import FuzzedCluster
from fuzzing.files import FileFuzzer
from fuzzing.findings import Findings, Input, corpus
from fuzzing.messages import MessageMaker, spoilt

from shoal_proto.errors import JournalDamaged, MalformedMessage, SnapshotDamaged
from shoal_proto.v1.replication_pb2 import DenseSpec
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.service.snapshots_servicer import read_shard
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.tables.restore import restore
from shoal_server.serving.locations import Location
from shoal_server.serving.message_bounds import MessageBounds
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest, ManifestEntry, part_file
from shoal_server.snapshots.storage import Storage

SEED = 20261123
NIGHTLY_S = 300.0


def test_a_seed_always_draws_the_same_inputs() -> None:
    """A finding could not be reproduced otherwise."""

    def draw(seed: int) -> list[bytes]:
        source = random.Random(seed)
        maker = MessageMaker(source, {"job": ["j"]})
        found = [maker.make(call.request).SerializeToString() for call in all_calls()]
        return [spoilt(source, data) for data in found]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_messages_are_made_for_every_call_and_many_pass_the_bounds() -> None:
    """Inputs that the first check refuses test no code after it."""
    maker, bounds = MessageMaker(random.Random(SEED), {"job": ["digits"]}), MessageBounds()
    passed = 0
    for call in all_calls():
        for _ in range(20):
            try:
                bounds.check(maker.make(call.request))
                passed += 1
            except ValueError:
                pass
    assert len(all_calls()) > 40
    assert passed > 3 * len(all_calls())


def test_spoilt_files_cause_no_unhandled_error(tmp_path: Path) -> None:
    fuzzer, findings = FileFuzzer(random.Random(SEED), tmp_path), Findings()
    for sent in corpus("files"):
        fuzzer.read(sent, findings)
    for _ in range(400):
        fuzzer.read(fuzzer.draw_input(), findings)
    assert findings.unhandled == []


def _of_another_type(spec: DenseSpec) -> None:
    spec.shard.dtype = "flmat32"


def _without_groups(spec: DenseSpec) -> None:
    del spec.optimizer.groups[:]


def _of_another_optimizer(spec: DenseSpec) -> None:
    spec.optimizer.kind = "sgb"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_of_another_type, "unknown type"),
        (_without_groups, "hyper-parameters"),
        (_of_another_optimizer, "does not know"),
    ],
)
def test_an_image_that_no_server_makes_is_refused_with_its_fault(
    tmp_path: Path, spoil: Callable[[DenseSpec], None], named: str
) -> None:
    """Images with a correct checksum may come from another program or a later release; they are
    refused in a snapshot and in a journal."""
    data = FileFuzzer(random.Random(SEED), tmp_path).image
    image = image_file.from_bytes(data, sha256=image_file.digest(data), file="image", shard_id=0)
    spec = DenseSpec.FromString(image.spec)
    spoil(spec)
    with pytest.raises(MalformedMessage, match=named):
        restore(replace(image, spec=spec.SerializeToString()))
    forged = replace(image, spec=spec.SerializeToString())

    storage = Storage(Location.of_directory(tmp_path / "snapshots"))
    file = image_file.DigestingReader(image_file.pieces(forged))
    path = part_file(1, "cut", 0)
    folder, _, name = path.rpartition("/")
    storage.write_pieces(f"job/{folder}", lambda: name, file)
    part = ManifestEntry(
        shard_id=0,
        epoch=1,
        version=1,
        kind="dense",
        file=path,
        num_bytes=file.num_bytes,
        sha256=file.sha256,
    )
    with pytest.raises(SnapshotDamaged, match=named):
        read_shard(SnapshotLibrary(storage, "job"), part)

    config = JournalConfig(directory=tmp_path / "journal")
    with Journal(config, fsync=lambda descriptor: None) as journal:
        journal.put_image("job", 1, forged)
    again = Journal(config, fsync=lambda descriptor: None)
    with pytest.raises(JournalDamaged, match=named):
        again.recover(restore)
    with again:
        pass


def test_a_manifest_with_a_time_beyond_a_float_is_refused(tmp_path: Path) -> None:
    outer = json.loads(FileFuzzer(random.Random(SEED), tmp_path).manifest)
    outer["snapshot"]["taken_unix_s"] = 10**400
    text = json.dumps(outer["snapshot"], sort_keys=True, separators=(",", ":"))
    outer["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    with pytest.raises(SnapshotDamaged):
        Manifest.from_bytes(json.dumps(outer).encode(), "manifest")


@pytest.mark.long
def test_no_input_causes_an_unhandled_error(tmp_path: Path) -> None:
    """A cluster of real processes gets inputs of each surface, and the earlier findings of gRPC."""
    outcome = run(SEED, seconds=0, size=0.3, directory=tmp_path, before=replay)
    tell(outcome)
    assert outcome.findings.unhandled == []
    assert outcome.num_depositions == 0
    assert set(outcome.findings.num_inputs) == {"grpc", "bulk", "http", "files", "etcd"}
    assert outcome.num_inputs > 500


def replay(cluster: FuzzedCluster, findings: Findings) -> None:
    """Send the inputs of gRPC that had earlier findings."""

    async def send() -> None:
        draw = random.Random(SEED)
        maker = MessageMaker(draw, {})
        calls = CallFuzzer(maker, draw, cluster.coordinator.grpc, cluster.server.grpc)
        try:
            for sent in corpus("grpc"):
                await calls.send(sent, findings)
        finally:
            await calls.close()

    asyncio.run(send())


def test_a_kept_input_is_read_back_unchanged(tmp_path: Path) -> None:
    sent, findings = Input(surface="grpc", to="/x/Y", parts=[b"\x00\xff", b""]), Findings()
    findings.found(sent, "why")
    findings.keep(tmp_path)
    (path,) = tmp_path.iterdir()
    assert Input.from_json(path.read_text()) == sent


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_five_minutes_of_inputs_cause_no_unhandled_error(tmp_path: Path) -> None:
    """The seed is drawn and printed."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    outcome = run(seed, seconds=NIGHTLY_S, directory=tmp_path)
    tell(outcome)
    assert outcome.findings.unhandled == []
    assert outcome.num_depositions == 0
    assert outcome.rss_growth_bytes < 64 << 20
