"""The newest version of each shard that a member has seen, for errors about lost shards."""

from shoal_proto.errors import StateLost


class SeenVersions:
    """Newest version seen of each shard, in an answer to a push or with received values. A later
    epoch is newer: a snapshot that was restored meanwhile has lower versions."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def note(self, shard_id: int, epoch: int, version: int) -> None:
        """Record a version that a server reported in this epoch. One thread at a time for each
        shard."""
        self._seen[shard_id] = max(self._seen.get(shard_id, (0, 0)), (epoch, version))

    def explained(self, lost: StateLost, what: str = "") -> StateLost:
        """The error, with the newest version seen of its shard. `what` replaces the error's `what`,
        unless it is empty."""
        _, version = self._seen.get(int(lost.details.get("shard", -1)), (0, 0))
        seen_version = f"version {version}" if version else "no version of it"
        return StateLost(
            what or lost.what,
            seen=f"{lost.seen}; this member has seen {seen_version}",
            expected=lost.expected,
            fix=lost.fix,
            details={**lost.details, **({"version": str(version)} if version else {})},
        )
