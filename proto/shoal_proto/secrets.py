"""Secrets that a process presents to prove its identity. They are stored only as digests.

A job's secret is in a file named by SHOAL_JOB_SECRET_FILE, so that it is not in the arguments of a
process. A launcher makes a secret for each of its workers, and keeps it across the worker's
restarts.
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
    """Secrets that a member presents, or its launcher for the member."""

    job: str = field(default="", repr=False)
    """The job's secret, which its first member sets; empty: none."""
    launch_digest: str = field(default="", repr=False)
    """Digest of the secret with which the launcher reports on the member; empty: reports on the
    member need no secret, but with TLS only an operator's are accepted."""


def new_secret() -> str:
    """Return a fresh secret: 256 bits in hexadecimal digits."""
    return secrets.token_hex(32)


def digest_of(secret: str) -> str:
    """Return the digest of a secret, which is stored instead of it; empty for no secret."""
    if not secret:
        return ""
    return hashlib.sha256(f"shoal secret\0{secret}".encode()).hexdigest()


def matches_digest(secret: str, digest: str) -> bool:
    """True if the secret has this digest; False for an empty digest."""
    return bool(digest) and hmac.compare_digest(digest_of(secret), digest)


def job_secret(environment: Mapping[str, str]) -> str:
    """Return the secret of this process's job; empty if none is set. Raises InvalidSpec."""
    name = environment.get(JOB_VARIABLE)
    return read_job_secret(Path(name)) if name else ""


def member_secrets(environment: Mapping[str, str]) -> MemberSecrets:
    """Return the secrets of the member that this process becomes. Raises InvalidSpec."""
    launch = environment.get(LAUNCH_VARIABLE, "")
    if not launch and not environment.get("SHOAL_BEATS"):
        # No launcher has started this process: a secret that no other process knows keeps all
        # launchers from reporting on it.
        launch = new_secret()
    return MemberSecrets(job=job_secret(environment), launch_digest=digest_of(launch))


def read_job_secret(path: Path) -> str:
    """Return the first line of the file, stripped. Raises InvalidSpec if the file cannot be read or
    is not ASCII, if its mode gives its group or others any access, or if the line has a bad
    length."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").partition("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise InvalidSpec(
            "the job's secret cannot be read", seen=str(error), expected=f"a text file; {_FIX}"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidSpec(
            "others may read the job's secret",
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
