"""Descriptions of tensors from other stages."""

import json

from support.collectives import pipeline_message_bodies as bodies
from support.processes.worlds import run_on_gloo

SENT = (
    '[["float3", [2], true]]',
    '[["float32", [-2], true]]',
    '[["float32", ["2"], true]]',
    '[["float32", 2, true]]',
    '[["float32", [2]]]',
    "[7]",
    "[",
)
LEAF = {"type": None, "context": None, "children_spec": []}
BROADCAST = (
    "7",
    json.dumps({"leaves": []}),
    json.dumps({"tree": "7", "leaves": []}),
    json.dumps({"tree": json.dumps([1, {**LEAF, "type": "no.Container"}]), "leaves": []}),
    json.dumps({"tree": json.dumps([1, LEAF]), "leaves": [{"value": 1}, {"value": 2}]}),
    json.dumps({"tree": json.dumps([1, LEAF]), "leaves": [{"tensor": ["float3", [2]]}]}),
    json.dumps({"tree": json.dumps([1, LEAF]), "leaves": [{"tensor": ["float32", [-2]]}]}),
)


def test_a_description_that_cannot_be_read_names_its_sender() -> None:
    errors, _ = run_on_gloo(2, bodies.malformed_descriptions, SENT, BROADCAST)
    assert len(errors) == len(SENT) + len(BROADCAST)
    assert all("stage 1 sent a description that cannot be read" in error for error in errors)
