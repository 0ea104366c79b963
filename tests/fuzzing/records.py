"""Records in etcd from another writer, read by the leader and by every server."""

import json
import random
from collections.abc import Sequence

import grpc
from fuzzing.findings import Findings, Input
from fuzzing.json_values import spoil_json
from fuzzing.messages import spoilt
from support.clusters.garbage import all_garbage

from shoal_proto.etcd import etcd_pb2
from shoal_proto.etcd.etcd_pb2_grpc import KVStub

PREFIX = "/shoal/v1/"
OWN = ("leader", "quarantine/")
"""Keys that get no spoilt copies: the leader's, and those of quarantined records."""


class RecordFuzzer:
    """Puts spoilt copies of etcd's records into etcd, under other names of jobs and servers."""

    def __init__(self, draw: random.Random, endpoint: str) -> None:
        self._draw = draw
        self._channel = grpc.insecure_channel(endpoint)
        self._store = KVStub(self._channel)
        self._garbage = all_garbage()
        self._num_put = 0

    def close(self) -> None:
        self._channel.close()

    def draw_inputs(self, num: int) -> Sequence[Input]:
        """Inputs made from real records, and from known garbage."""
        real = self._real()
        found = []
        while len(found) < num:
            self._num_put += 1
            name = f"spoilt-{self._num_put}"
            if not real or self._draw.random() < 0.2:
                garbage = self._draw.choice(self._garbage)
                entries = {
                    key.replace(garbage.job, name): value for key, value in garbage.entries.items()
                }
            else:
                key, value = self._draw.choice(real)
                entries = {self._renamed(key, name): self._spoilt(value)}
            found += [
                Input(surface="etcd", to="", parts=[key.encode(), value])
                for key, value in entries.items()
            ]
        return found[:num]

    def _real(self) -> list[tuple[str, bytes]]:
        asked = etcd_pb2.RangeRequest(key=PREFIX.encode(), range_end=PREFIX[:-1].encode() + b"0")
        found = [(kv.key.decode(), kv.value) for kv in self._store.Range(asked).kvs]
        return [
            (key, value)
            for key, value in found
            if not key.startswith(tuple(PREFIX + own for own in OWN)) and "spoilt-" not in key
        ]

    @staticmethod
    def _renamed(key: str, name: str) -> str:
        """The same kind of key, for another job or server."""
        parts = key.removeprefix(PREFIX).split("/")
        if len(parts) > 1:
            parts[1] = name
        return PREFIX + "/".join(parts)

    def _spoilt(self, value: bytes) -> bytes:
        if self._draw.random() < 0.5:
            return spoilt(self._draw, value)
        try:
            found = json.loads(value)
        except ValueError:
            return spoilt(self._draw, value)
        if isinstance(found, dict | list):
            spoil_json(self._draw, found)
        return json.dumps(found).encode()

    def put(self, inputs: Sequence[Input], findings: Findings) -> None:
        for sent in inputs:
            key, value = sent.parts
            self._store.Put(etcd_pb2.PutRequest(key=key, value=value))
            findings.note(sent, "written")

    def remove(self, inputs: Sequence[Input]) -> None:
        for sent in inputs:
            self._store.DeleteRange(etcd_pb2.DeleteRangeRequest(key=sent.parts[0]))
