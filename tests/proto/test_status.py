"""A status code tells clients in any language which side caused a failure."""

import os
import string
from base64 import b64encode
from urllib.parse import quote

import grpc
import pytest

from shoal_proto.errors import (
    AccessDenied,
    ChecksumMismatch,
    InternalError,
    InvalidSpec,
    ShoalError,
    SnapshotDamaged,
)
from shoal_proto.status import ERROR_METADATA_KEY, to_status
from shoal_proto.v1.identity_pb2 import ErrorDetail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("a fault of ours"), grpc.StatusCode.INTERNAL),
        (ChecksumMismatch("damaged on the way"), grpc.StatusCode.DATA_LOSS),
        (SnapshotDamaged("damaged in storage"), grpc.StatusCode.DATA_LOSS),
        (AccessDenied("not there"), grpc.StatusCode.PERMISSION_DENIED),
        (InvalidSpec("not so"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_each_kind_of_failure_has_its_status_code(error: ShoalError, code: grpc.StatusCode) -> None:
    assert to_status(error)[0] is code


@pytest.mark.parametrize("character", ["a", "é", "貝", "🐚", "%", "\n"])
def test_a_long_error_fits_into_the_header_in_any_script(character: str) -> None:
    """A client refuses headers of more than 8 KiB, and would then not get the error at all."""
    text = character * 5000
    details = {f"{number}{text}": text for number in range(20)}
    error = InternalError(text, seen=text, expected=text, fix=text, details=details)
    _, message, ((key, value),) = to_status(error)
    encoded = quote(message, safe=string.punctuation.replace("%", "") + " ")
    assert key == ERROR_METADATA_KEY
    assert len(encoded) + len(b64encode(value)) < 7000
    detail = ErrorDetail.FromString(value)
    assert text.startswith(message) and len(message) > 80
    assert text.startswith(detail.fix) and len(detail.fix) > 100
    assert detail.details


def test_an_error_that_names_a_file_with_bytes_that_are_not_utf8_is_sent() -> None:
    name = os.fsdecode(b"/data/caf\xe9")
    error = InvalidSpec(name, seen=name, expected=name, fix=name, details={"path": name})
    _, message, ((_, value),) = to_status(error)
    assert message.startswith(r"/data/caf\udce9; saw")
    assert ErrorDetail.FromString(value).details["path"] == r"/data/caf\udce9"
