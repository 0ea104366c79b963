"""Files on disks and in buckets, changed by another writer: journals, images, manifests."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from fuzzing.findings import Findings, Input
from fuzzing.json_values import spoil_json
from fuzzing.messages import spoilt

from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.segment_format import scan
from shoal_server.parameters.shard import image_file
from shoal_server.parameters.shard.dense import DensePush, new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.tables.restore import restore
from shoal_server.snapshots.manifest import Manifest, ManifestEntry

NUM_ELEMENTS = 64
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1, momentum=0.9)])


class FileFuzzer:
    """Reads spoilt copies of good files in this process; the only error may be a refusal."""

    def __init__(self, draw: random.Random, directory: Path) -> None:
        self._draw = draw
        self._directory = directory
        good = directory / "good"
        self.image = _journal(good)
        self._journal = {path.relative_to(good): path.read_bytes() for path in _files(good)}
        self._segment = next(d for p, d in self._journal.items() if p.name.startswith("segment"))
        self.manifest = _manifest(self.image).to_bytes()
        self._readers: dict[str, Callable[[bytes], object]] = {
            "segment": lambda data: scan(data, "segment-1.log", is_last=self._draw.random() < 0.5),
            "image": self._read_image,
            "manifest": lambda data: Manifest.from_bytes(data, "manifest"),
            "journal": self._recover,
        }

    def draw_input(self) -> Input:
        kind = self._draw.choices(list(self._readers), (10, 10, 10, 1))[0]
        good = {
            "segment": self._segment,
            "image": self.image,
            "manifest": self.manifest,
            "journal": self._segment,
        }[kind]
        if kind == "manifest" and self._draw.random() < 0.5:
            data = self._forged_manifest()
        else:
            data = spoilt(self._draw, good)
        return Input(surface="files", to=kind, parts=[data])

    def _forged_manifest(self) -> bytes:
        """A manifest with changed values and a correct checksum."""
        outer = json.loads(self.manifest)
        body = outer["snapshot"]
        for _ in range(self._draw.choice((1, 1, 3))):
            spoil_json(self._draw, body)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        outer["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps(outer).encode()

    def read(self, sent: Input, findings: Findings) -> None:
        outcome = "taken"
        try:
            self._readers[sent.to](sent.parts[0])
        except ShoalError as error:
            outcome = type(error).__name__
            if isinstance(error, InternalError):
                findings.found(sent, f"{sent.to}: {error!r}")
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            findings.found(sent, f"{sent.to}: {error!r}")
        findings.note(sent, outcome)

    def _read_image(self, data: bytes) -> None:
        image = image_file.from_bytes(
            data, sha256=image_file.digest(data), file="image", shard_id=0
        )
        restore(image)

    def _recover(self, data: bytes) -> None:
        folder = self._directory / "spoilt"
        shutil.rmtree(folder, ignore_errors=True)
        for path, good in self._journal.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data if path.name.startswith("segment") else good)
        journal = Journal(JournalConfig(directory=folder), fsync=lambda descriptor: None)
        try:
            journal.recover(restore)
        finally:
            with journal:
                pass


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _journal(directory: Path) -> bytes:
    """Write a journal of one shard, and return the bytes of its image."""
    block = Block(parameter="p", num_elements=NUM_ELEMENTS)
    spec = Shard(shard_id=0, server_id="ps-0", epoch=1, dtype="float32", blocks=[block])
    shard = new_dense_shard(spec, SGD, bytearray(4 * NUM_ELEMENTS))
    records: list[UpdateRecord] = []
    shard.subscribe(records.append)
    with Journal(JournalConfig(directory=directory), fsync=lambda descriptor: None) as journal:
        journal.put_image("job", 1, shard.image())
        for sequence in range(1, 9):
            gradient = torch.full((NUM_ELEMENTS,), float(sequence)).numpy().tobytes()
            push = DensePush(
                session="s",
                sequence=sequence,
                epoch=1,
                base_version=sequence,
                lr=None,
                blocks=[0],
                gradient=gradient,
            )
            shard.push(push, lambda session: True)
            journal.append("job", 0, 1, records[-1]).result()
    return b"".join(image_file.pieces(shard.image()))


def _manifest(image: bytes) -> Manifest:
    part = ManifestEntry(
        shard_id=0,
        kind="dense",
        epoch=1,
        version=9,
        file="parts/000000001-cut/shard-00000.safetensors",
        num_bytes=len(image),
        sha256=image_file.digest(image),
    )
    return Manifest(
        job="job",
        number=1,
        cut_id="cut",
        lineage="",
        taken_unix_s=1.7e9,
        parts=(part,),
        layout=b"layout",
        steps={"s": 8},
        partial_steps=(),
        cursor=None,
        training={"step": 8},
    )
