"""A status code tells clients in any language which side caused a failure."""

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
from shoal_proto.status import to_status


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
