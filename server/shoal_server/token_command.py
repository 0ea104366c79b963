"""`shoal token`: tokens for people and tools that use a coordinator's status page and HTTP API."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal_server.status.access import tokens
from shoal_server.status.access.tokens import HttpRole

DEFAULT_FILE = Path("shoal-tokens")


@dataclass(frozen=True, kw_only=True)
class TokenConfig:
    """Makes tokens for the HTTP API and the status page. A program sends a token in the header
    `Authorization: Bearer TOKEN`; a person logs in to the page with it. `create` prints a new
    token and adds its hash to the file. `list` prints the names and roles in the file.

    Give the file to `shoal coordinator --http-tokens FILE`, which reads it again when it changes.
    To revoke a token and end its sessions, remove its line.
    """

    action: Annotated[Literal["create", "list"], Parameter(show_default=False)] = field(
        kw_only=False
    )
    """Action to take."""
    role: Literal["viewer", "operator"] = "viewer"
    """Role of a new token: viewer reads; operator drains members and stops jobs too."""
    name: Annotated[str, Parameter(metavar="NAME")] = ""
    """Name of a new token's holder, which the log shows with each action. By default the role's
    name."""
    file: Annotated[Path, Parameter(metavar="FILE")] = DEFAULT_FILE
    """File with the hashes; created with mode 0600 if it does not exist."""


def token(config: TokenConfig) -> int:
    """Print a new token, or the names and roles of all tokens. Raises what `tokens` raises."""
    if config.action == "create":
        print(tokens.add(config.file, config.name or config.role, HttpRole(config.role)))
        return 0
    for holder in tokens.read(config.file):
        print(f"{holder.name} {holder.role.value}")
    return 0
