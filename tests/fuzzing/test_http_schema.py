"""The HTTP API under schemathesis: requests drawn from its own schema, valid and invalid, and
answers that must follow the schema."""

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from fuzzing.cluster import FuzzedCluster
from fuzzing.http_requests import STREAM
from hypothesis import HealthCheck
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, load_all_checks
from support.network import http

SEED = 20261123
EXAMPLES = 150
"""Maximum number of examples for each operation that the schema allows, and of those that it does
not."""
ALL = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedCluster]:
    with FuzzedCluster(tmp_path_factory.mktemp("schema")) as started:
        yield started


@pytest.mark.nightly
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_answers_follow_the_schema(
    cluster: FuzzedCluster, mode: schemathesis.GenerationMode
) -> None:
    """Operations are checked except the stream, which has no end. No answer is a 500, or has a
    status, type, header or field outside the schema, and no log has an unhandled exception."""
    load_all_checks()
    checks = CHECKS.get_by_names(ALL)
    url = cluster.coordinator.http
    document = http.get(f"{url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    known = {"job": cluster.job, "member": cluster.token.member_id}
    seen = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == STREAM:
            continue

        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            # Schemathesis discards many of its draws in negative mode, because they are valid.
            suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            # Half of the requests name existing things: the others fail at the first check.
            if len(str(case.path_parameters)) % 2:
                case.path_parameters |= {
                    k: v for k, v in known.items() if k in case.path_parameters
                }
            case.call_and_validate(base_url=url, checks=checks, timeout=10.0)

        try:
            check()
        except Unsatisfiable:
            # The operation takes no input, so that no input can be wrong.
            assert mode is schemathesis.GenerationMode.NEGATIVE and not operation.body
            continue
        seen += 1
    assert seen > (15 if mode is schemathesis.GenerationMode.POSITIVE else 8)
    assert cluster.not_foreseen() == []
    assert cluster.depositions() == []
