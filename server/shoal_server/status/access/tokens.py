"""Tokens for the HTTP API. A file holds their hashes, one a line: NAME ROLE SHA256. A plain hash is
enough, as a token has 256 random bits."""

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import NAME_RULE, is_name

PREFIX = "shoal_"
"""Prefix by which scanners of source and logs recognise a token."""
NUM_BYTES = 32
MAX_TOKENS = 1024
MAX_TOKEN_LENGTH = 256
_HASH = re.compile("[0-9a-f]{64}")


class HttpRole(Enum):
    """Role of a token's holder."""

    VIEWER = "viewer"
    OPERATOR = "operator"

    def may_act(self) -> bool:
        return self is HttpRole.OPERATOR


@dataclass(frozen=True, kw_only=True)
class TokenHolder:
    """Name and role of a token's holder."""

    name: str
    role: HttpRole
    digest: str


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(NUM_BYTES)


def add(path: Path, name: str, role: HttpRole) -> str:
    """Make a token, add its hash to the file, and return it. Raises InvalidSpec for a bad or
    existing name, a full file, and what `read` raises; OSError if the file cannot be written."""
    if not is_name(name):
        raise InvalidSpec("bad name of a token", seen=repr(name), expected=NAME_RULE)
    holders = read(path) if path.exists() else ()
    if any(each.name == name for each in holders):
        raise InvalidSpec(
            f"{path} has a token of that name",
            seen=name,
            expected="another name",
            fix=f"Remove its line from {path} to create it again.",
        )
    if len(holders) >= MAX_TOKENS:
        raise InvalidSpec(
            f"{path} is full", seen=f"{len(holders)} tokens", expected=f"at most {MAX_TOKENS}"
        )
    token = new_token()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a+") as file:
        file.seek(0)
        known = file.read()
        # An editor may have left the last line without an end.
        begin = "\n" if known and not known.endswith("\n") else ""
        file.write(f"{begin}{name} {role.value} {digest_of(token)}\n")
    return token


def read(path: Path) -> Sequence[TokenHolder]:
    """Read the holders of tokens. Raises InvalidSpec if the file cannot be read, if its group may
    do more than read it, if others have any access, or if a line is invalid."""
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(
            f"the tokens in {path} cannot be read",
            seen=str(error),
            expected="a file of lines NAME ROLE SHA256",
            fix=f"Make one: shoal token create --role viewer --name NAME --file {path}",
        ) from error
    # Files of a Kubernetes Secret belong to root, and to the group of the pod.
    if mode & (stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO):
        raise InvalidSpec(
            f"others may read or write {path}",
            seen=f"mode {stat.S_IMODE(mode):04o}",
            expected="0600, or 0640 for a group",
            fix=f"chmod 600 {path}",
        )
    return [_holder(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _holder(path: Path, number: int, line: str) -> TokenHolder:
    parts = line.split()
    roles = {role.value: role for role in HttpRole}
    is_good = len(parts) == 3 and is_name(parts[0]) and parts[1] in roles
    if not is_good or not _HASH.fullmatch(parts[2]):
        # The line is not shown: it may contain a token by mistake.
        raise InvalidSpec(
            f"line {number} of {path} does not describe a token",
            seen=f"{len(parts)} fields",
            expected=f"NAME ROLE SHA256, with a role of {' or '.join(roles)}",
        )
    return TokenHolder(name=parts[0], role=roles[parts[1]], digest=parts[2])


class Tokens:
    """Tokens of one file, which is read again when it has changed. Removing a line ends its token
    and the token's sessions."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidSpec."""
        self._path = path
        self._seen = _stamp(path)
        self._holders = read(path)

    def holder(self, token: str) -> TokenHolder | None:
        """Holder of a token; None if unknown. Raises InvalidSpec if the changed file is invalid."""
        if len(token) > MAX_TOKEN_LENGTH:
            return None
        return self.of_digest(digest_of(token))

    def of_digest(self, digest: str) -> TokenHolder | None:
        """Holder of the token with this hash; None if unknown. Raises what `holder` raises."""
        self._refresh()
        found = None
        # Compared with all hashes, so that the time does not reveal a match.
        for each in self._holders:
            if hmac.compare_digest(each.digest, digest):
                found = each
        return found

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp != self._seen:
            self._holders = read(self._path)
            self._seen = stamp


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_ino, found.st_size
