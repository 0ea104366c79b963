"""Secrets that prove a process's identity. The coordinator stores only their digests.

A job's secret is in a file, because other users can read a process's arguments. The environment
variable SHOAL_JOB_SECRET_FILE has its path. A launcher makes a secret for each of its workers.
"""

import hashlib
import hmac
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal_proto.errors import InvalidSpec

JOB_VARIABLE = "SHOAL_JOB_SECRET_FILE"
LAUNCH_VARIABLE = "SHOAL_LAUNCH_SECRET"
MIN_LENGTH, MAX_LENGTH = 16, 128


@dataclass(frozen=True, kw_only=True)
class MemberSecrets:
    """Secrets of a member and of its launcher."""

    job: str = field(default="", repr=False)
    """The job's secret, set by its first member; empty: none."""
    launch_digest: str = field(default="", repr=False)
    """Digest of the secret with which the launcher reports on the member. Empty: reports need no
    secret, but with TLS an operator's certificate."""


def new_secret() -> str:
    """Return a fresh secret: 256 bits in hexadecimal digits."""
    return secrets.token_hex(32)


def digest_of(secret: str) -> str:
    """Return the digest of a secret; empty for no secret."""
    if not secret:
        return ""
    return hashlib.sha256(f"shoal secret\0{secret}".encode()).hexdigest()


def matches_digest(secret: str, digest: str) -> bool:
    """True if the secret has this digest; False for an empty digest."""
    return bool(digest) and hmac.compare_digest(digest_of(secret), digest)


def job_secret(environment: Mapping[str, str]) -> str:
    """Return the secret of this process's job, empty if it has none. Raises InvalidSpec."""
    name = environment.get(JOB_VARIABLE)
    return read_job_secret(Path(name)) if name else ""


def member_secrets(environment: Mapping[str, str]) -> MemberSecrets:
    """Return the secrets of this process as a member. Raises InvalidSpec."""
    launch = environment.get(LAUNCH_VARIABLE, "")
    if not launch and not environment.get("SHOAL_BEATS"):
        # Without a launcher, a secret that no other process knows keeps launchers from reporting on
        # this member.
        launch = new_secret()
    return MemberSecrets(job=job_secret(environment), launch_digest=digest_of(launch))


def read_job_secret(path: Path) -> str:
    """Return the first line of the file, stripped. Raises InvalidSpec if the file cannot be read,
    is not ASCII or is accessible to other users, or if the line has a bad length."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").partition("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise InvalidSpec(
            "the job's secret cannot be read", seen=str(error), expected=f"a text file; {_FIX}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidSpec(
            "the file of the job's secret is accessible to other users",
            seen=f"{path} has mode {stat.S_IMODE(mode):04o}",
            expected="0600",
            fix=f"chmod 600 {path}",
        )
    if not MIN_LENGTH <= len(text) <= MAX_LENGTH:
        raise InvalidSpec(
            "the job's secret has a bad length",
            seen=f"{len(text)} characters in the first line of {path}",
            expected=f"{MIN_LENGTH} to {MAX_LENGTH}",
            fix=_FIX,
        )
    return text


_FIX = "Make one: (umask 077; openssl rand -hex 32 > FILE)"
