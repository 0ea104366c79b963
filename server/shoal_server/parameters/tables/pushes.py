"""What goes into a shard of a table, and what comes out of it."""

from dataclasses import dataclass

from shoal_server.parameters.shard.step_scope import Scope


@dataclass(frozen=True, kw_only=True)
class TablePush:
    """Gradients for rows of one shard, as they came."""

    session: str
    sequence: int
    epoch: int
    base_version: int
    base_epoch: int = 0
    """The shard's epoch when the rows were looked up; 0: not told."""
    step: int
    """Which step of the table the pusher takes it for."""
    lr: float | None
    row_ids: bytes
    births: bytes
    gradient: bytes
    at_unix_s: float
    """When it came in, by this server's clock."""
    scope: Scope | None = None
    """What the push is part of; None: it touches this shard alone."""


@dataclass(frozen=True, kw_only=True)
class TableOutcome:
    version: int
    staleness: int
    fates: bytes
    """A RowFate for each row as it came; empty: all were applied."""
    is_duplicate: bool = False


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """Rows as of one version, in the order asked for."""

    version: int
    births: bytes
    values: bytes
    table_step: int
