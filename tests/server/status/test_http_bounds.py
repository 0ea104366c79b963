"""Bounds on every text, list and number received over HTTP, as stated in the API's schema."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.clusters.status_world import World

NUMBERS_AS_NEWS = {"loss"}
"""Fields that may be infinite or not a number: a report must be able to have such a loss."""


def inputs(app: FastAPI) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema of each parameter and of each field of a body, by name."""
    document = app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                yield f"{method} {path} {parameter['name']}", parameter["schema"]
            body = operation.get("requestBody")
            if body is not None:
                reference = body["content"]["application/json"]["schema"]["$ref"]
                model = document["components"]["schemas"][reference.rpartition("/")[2]]
                for name, schema in model["properties"].items():
                    yield f"{method} {path} {name}", schema


def unbounded(schema: dict[str, Any]) -> bool:
    either = schema.get("anyOf", ())
    if either:
        return any(unbounded(each) for each in either)
    bound = {
        "string": ("maxLength", "pattern", "enum"),
        "integer": ("maximum", "exclusiveMaximum"),
        "array": ("maxItems",),
        "object": ("maxProperties",),
    }.get(schema.get("type", ""))
    return bound is not None and not any(each in schema for each in bound)


@pytest.mark.long
def test_every_input_has_a_bound(shown: tuple[World, FastAPI]) -> None:
    found = dict(inputs(shown[1]))
    assert len(found) > 15
    assert [name for name, schema in found.items() if unbounded(schema)] == []


@pytest.mark.sampled()
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_infinite_numbers_are_refused(
    value: str, world: World, http: httpx.AsyncClient, shown: tuple[World, FastAPI]
) -> None:
    """The refusal names the field; only the loss may be such a number."""
    report = "/api/v1/jobs/digits/members/w1/health"
    for name, schema in inputs(shown[1]):
        field = name.rpartition(" ")[2]
        kinds = {each.get("type") for each in (schema, *schema.get("anyOf", ()))}
        if not name.startswith("post ") or "number" not in kinds or "health" not in name:
            continue
        content = f'{{"incarnation": "incarnation-of-w1", "{field}": {value}}}'
        headers = {"content-type": "application/json"}
        answer = await http.post(report, content=content, headers=headers)
        if field in NUMBERS_AS_NEWS:
            assert answer.status_code == 204, field
        else:
            assert answer.status_code == 422 and field in answer.json()["what"], field
    assert not math.isfinite(float(value))
