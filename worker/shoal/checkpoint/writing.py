"""Writer of the checkpoint of a state that a group's ranks hold. Every rank must call `write`.

    first rank begins a draft                    -> gather: outlines of the ranks' shards
    every rank writes its share, durably         -> gather: the file span of each entry
    first rank writes .metadata and publishes    -> gather: done
        (and deletes old checkpoints)

DCP's own coordination unpickles objects that peers send. Here ranks exchange JSON, and each rank
computes the same plan from it.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.checkpoint import names, storage
from shoal.checkpoint.bucket_paths import BucketPath, CheckpointPath, located
from shoal.checkpoint.drafts import Draft
from shoal.checkpoint.entries import CheckpointEntry, FileSpan
from shoal.checkpoint.peers import ALONE, Peers
from shoal.checkpoint.write_plan import PlannedChunk, from_json, items_of, plan_writes, to_json
from shoal.state.optimizer_state import SLOTS, merged
from shoal.state.shards import StateShard
from shoal_proto.errors import CheckpointFailed, GenerationBroken, InvalidSpec, ShoalError

FIRST = 0
"""Rank that begins the draft, writes the entries that are not shards, and publishes."""
NEWEST_STEP = "newest_step"
"""Key in the details of the error for ranks that write different steps."""

_FIXES = {
    errno.ENOSPC: "Free space there, keep fewer checkpoints, or write elsewhere.",
    errno.EDQUOT: "Free space there, keep fewer checkpoints, or write elsewhere.",
    errno.EACCES: "Let the user that trains write there, or write elsewhere.",
    errno.EROFS: "Write elsewhere.",
}


def write(
    path: str | os.PathLike[str] | BucketPath,
    state_shard: StateShard,
    peers: Peers = ALONE,
    *,
    continues: bool = True,
    published: Callable[[], None] = lambda: None,
) -> int:
    """Write the checkpoint at `path`; return the bytes of its entries, on every rank, once it is
    complete.

    `state_shard` must not change meanwhile. An error on one rank is raised on all, and the draft is
    removed. Raises CheckpointFailed for an error of the system, or files that cannot be read back.
    Raises InvalidSpec, ShapeMismatch or DtypeMismatch if the ranks do not hold a whole state, and
    InvalidSpec if checkpoints of later steps exist and no rank `continues` their run.

    `published` is called on the first rank, once the checkpoint is complete; the other ranks return
    after that, so that no rank's trainer waits longer than the others'.

    Raises CheckpointFailed, with the newest step in `details`, if the ranks' steps differ. Raises
    GenerationBroken if a peer is lost: then the checkpoint may be complete, and the next
    writer removes leftovers.
    """
    writer = _Writer(located(path), state_shard, peers)
    try:
        items = writer.open(continues)
        spans = writer.write_share(items[peers.rank])
        writer.publish(items, spans, published)
        return sum(num_bytes for own in spans for _, _, num_bytes in own)
    except GenerationBroken:
        raise
    except ShoalError:
        writer.give_up()
        raise


class _Writer:
    """Steps in which one rank writes its part, to be called in order."""

    def __init__(self, path: CheckpointPath, state_shard: StateShard, peers: Peers) -> None:
        self._path = path
        self._draft = storage.draft_of(path)
        self._state_shard = state_shard
        self._peers = peers
        self._first = peers.rank == FIRST
        self._continues = True
        self._opened: Sequence[Mapping[str, Any]] = ()
        self._values: Mapping[names.Path, object] = {}
        """Entries that are not shards; empty on other ranks than the first."""

    def open(self, continues: bool) -> list[list[PlannedChunk]]:
        """Agree on a draft; return the chunks that each rank writes."""

        def act() -> Any:
            if self._first:
                self._draft.begin()
            return {
                "step": self._state_shard.step,
                "partial": self._draft.name,
                "continues": continues,
                "outlines": to_json(items_of(self._state_shard)),
                "elsewhere": sorted(self._state_shard.elsewhere),
                SLOTS: self._state_shard.values.get(SLOTS),
            }

        opened = self._on_all_ranks("could not be begun", act)
        self._draft.join(opened[FIRST]["partial"])
        self._continues = any(answer["continues"] for answer in opened)
        steps = [int(answer["step"]) for answer in opened]
        if len(set(steps)) > 1:
            raise self._steps_differ(steps)
        self._opened = opened
        return plan_writes(
            [from_json(answer["outlines"]) for answer in opened],
            known={name for answer in opened for name in answer["elsewhere"]},
        )

    def _steps_differ(self, steps: Sequence[int]) -> CheckpointFailed:
        return CheckpointFailed(
            f"the ranks write checkpoints of different steps to {self._path.parent}",
            seen="; ".join(f"step {step} by rank {rank}" for rank, step in enumerate(steps)),
            expected="the same step on every rank",
            fix="If the checkpoint before exceeded its limit_s on some ranks only, the ranks write"
            " the next one together again.",
            details={"path": str(self._path), NEWEST_STEP: str(max(steps))},
        )

    def write_share(self, items: Sequence[PlannedChunk]) -> list[list[FileSpan]]:
        """Write this rank's share; return the spans of each rank's `_entries`."""

        def act() -> Any:
            if self._first:
                if not self._continues:
                    storage.refuse_later(self._path.parent, self._state_shard.step)
                self._draft.sweep()
                # Within `act`: an error here is raised on all ranks.
                known = {**self._state_shard.values, SLOTS: merged(self._opened)}
                self._values = names.entries_of(self._state_shard.step, known)
            elif not self._draft.shares_storage():
                raise InvalidSpec(
                    f"rank {self._peers.rank} does not see the draft of {self._path}",
                    expected="storage that all ranks share",
                )
            values = [self._content(item) for item in items] + list(self._values.values())
            entries = self._entries(items, self._first)
            return self._draft.write(self._peers.rank, list(zip(entries, values, strict=True)))

        return self._on_all_ranks("could not be written", act)

    def _content(self, item: PlannedChunk) -> object:
        shard = self._state_shard.shards[item.name]
        return shard.tensor.detach()[item.chunk.slices_in(shard.chunk)]

    def _entries(self, items: Sequence[PlannedChunk], first: bool) -> list[CheckpointEntry]:
        entries = [CheckpointEntry.of_item(item) for item in items]
        values = self._values.items() if first else ()
        return entries + [CheckpointEntry.of_value(path, value) for path, value in values]

    def publish(
        self,
        items: Sequence[Sequence[PlannedChunk]],
        located: Sequence[Sequence[FileSpan]],
        published: Callable[[], None],
    ) -> None:
        def act() -> Any:
            if self._first:
                stored = list(self._stored(items, located))
                _check_files(self._draft, [span for _, span in stored])
                self._draft.publish(stored)
                published()

        self._on_all_ranks("could not be completed", act)

    def _stored(
        self, items: Sequence[Sequence[PlannedChunk]], located: Sequence[Sequence[FileSpan]]
    ) -> Iterator[tuple[CheckpointEntry, FileSpan]]:
        """Yield all ranks' entries, a tied parameter under each of its names."""
        tied: Any = self._state_shard.values.get("tied", {})
        aliases: dict[names.Path, list[str]] = {}
        for alias, name in tied.items():
            aliases.setdefault(("model", name), []).append(alias)
        for rank, (rank_items, spans) in enumerate(zip(items, located, strict=True)):
            for entry, span in zip(self._entries(rank_items, rank == FIRST), spans, strict=True):
                yield entry, span
                for alias in aliases.get(entry.path, []):
                    yield CheckpointEntry(("model", alias), entry.data), span

    def give_up(self) -> None:
        """Discard the draft. All ranks have failed here, so none still writes."""
        if self._first:
            self._draft.discard()

    def _on_all_ranks(self, stage: str, act: Callable[[], Any]) -> list[Any]:
        """Return the results of `act` on all ranks, or raise one rank's error on all."""
        failure: ShoalError | None = None
        try:
            message: dict[str, Any] = {"done": act()}
        except Exception as error:  # noqa: BLE001 - raised below, on every rank
            failure = self._failure(stage, error)
            message = {"failed": failure.to_dict()}
        answers = [json.loads(text) for text in self._gather(json.dumps(message).encode())]
        for rank, answer in enumerate(answers):
            if "failed" in answer:
                own_failure = failure if rank == self._peers.rank else None
                raise own_failure or ShoalError.from_dict(answer["failed"])
        return [answer["done"] for answer in answers]

    def _gather(self, message: bytes) -> list[bytes]:
        try:
            return self._peers.gather(message)
        except RuntimeError as error:
            raise GenerationBroken(
                f"the generation ended while {self._path} was written", seen=str(error)[:200]
            ) from error

    def _failure(self, stage: str, error: Exception) -> ShoalError:
        # A listing that fails says nothing about what the user asked for.
        of_system = isinstance(error, InvalidSpec) and isinstance(error.__cause__, OSError)
        if isinstance(error, ShoalError) and not of_system:
            return error
        system = _from_system(error)
        details = {"path": str(self._path), "rank": str(self._peers.rank)}
        if system is not None and system.errno is not None:
            details["errno"] = errno.errorcode.get(system.errno, str(system.errno))
        failure = CheckpointFailed(
            f"the checkpoint {self._path} {stage}",
            seen=f"rank {self._peers.rank}: {repr(error) if system is None else system}",
            fix=_FIXES.get(system.errno or 0, "") if system else "",
            details=details,
        )
        failure.__cause__ = error
        return failure


def _from_system(error: BaseException | None) -> OSError | None:
    """Return the underlying OSError, if there is any."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _check_files(draft: Draft, spans: Sequence[FileSpan]) -> None:
    ends: dict[str, int] = {}
    for file, offset, length in spans:
        ends[file] = max(ends.get(file, 0), offset + length)
    for file, end in ends.items():
        size = draft.size(file)
        if size < end:
            raise InvalidSpec(
                f"a rank has written {file}, but the first rank does not see all of it",
                seen="no file" if size < 0 else f"{size} bytes",
                expected=f"{end} bytes, on storage that all ranks share",
            )
