"""Secrets of jobs and launchers: where they are read, and which ones are refused."""

from pathlib import Path

import pytest

from shoal_proto.errors import InvalidSpec
from shoal_proto.secrets import (
    JOB_VARIABLE,
    LAUNCH_VARIABLE,
    digest_of,
    job_secret,
    matches_digest,
    member_secrets,
    new_secret,
)


def test_only_the_secret_itself_proves_it() -> None:
    """The digest does not prove it, and no text proves an absent secret."""
    secret = new_secret()
    digest = digest_of(secret)
    assert matches_digest(secret, digest)
    assert (
        not matches_digest(digest, digest)
        and not matches_digest("", digest)
        and not matches_digest(new_secret(), digest)
    )
    assert digest_of("") == "" and not matches_digest("", "")


def test_a_jobs_secret_is_the_first_line_of_its_owners_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123\nand a remark\n")
    path.chmod(0o600)
    assert job_secret({JOB_VARIABLE: str(path)}) == "0123456789abcdef0123"
    assert job_secret({}) == ""


@pytest.mark.parametrize(
    ("text", "mode", "named"),
    [
        ("0123456789abcdef", 0o640, "accessible to other users"),
        ("too short", 0o600, "bad length"),
        ("x" * 129, 0o600, "bad length"),
        ("", 0o600, "bad length"),
        ("ümläut-ümläut-ümläut", 0o600, "cannot be read"),
    ],
)
def test_an_invalid_secret_is_refused_without_being_shown(
    tmp_path: Path, text: str, mode: int, named: str
) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidSpec, match=named) as refused:
        job_secret({JOB_VARIABLE: str(path)})
    assert not text or text not in str(refused.value)


def test_a_missing_secret_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="cannot be read"):
        job_secret({JOB_VARIABLE: str(tmp_path / "none")})


def test_a_process_without_a_launcher_has_a_secret_of_its_own() -> None:
    """A member without a launcher draws a secret that no other process knows. If a launcher gave no
    secret, reports from any process count."""
    assert member_secrets({LAUNCH_VARIABLE: "s"}).launch_digest == digest_of("s")
    first, second = member_secrets({}).launch_digest, member_secrets({}).launch_digest
    assert first and second and first != second
    assert member_secrets({"SHOAL_BEATS": "board#0"}).launch_digest == ""
