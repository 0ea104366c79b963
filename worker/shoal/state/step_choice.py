"""Choice of the step from which all ranks continue. Pure: all ranks compute the same result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from shoal.state.grid import grid_of
from shoal.state.inventory import Inventory, Meta, add_meta
from shoal.state.optimizer_state import SLOTS, is_of_value, merged
from shoal.state.shards import MODEL, Chunk, Json, Names, groups_of, partition_names
from shoal_proto.errors import StateLost

MAX_NAMED = 3
MAX_STEPS_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class ChosenStep:
    """A step whose whole state the ranks hold together."""

    step: int
    metas: Mapping[str, Meta]
    holders: Mapping[str, Mapping[Chunk, Sequence[int]]]
    values: Mapping[str, Json]
    """Plain values of the first rank that reports any; the optimizer's (`SLOTS`) of all ranks."""

    def on_each(self, world_size: int) -> bool:
        """True if every rank holds all of every tensor."""
        return all(
            len(self.holders[name].get(Chunk.whole(meta.shape), ())) == world_size
            for name, meta in self.metas.items()
        )


def choose(inventories: Sequence[Inventory]) -> ChosenStep:
    """Choose the newest step at which every element of every tensor is held by some rank.

    A tensor of the model exists at every step. Any other tensor exists from the first step at which
    a rank reports it. Exception: plain values of an optimizer, and tensors within them, may come
    and go. Raises StateLost if no step is whole, and ShapeMismatch or DtypeMismatch if ranks
    contradict one another.
    """
    metas: dict[str, Meta] = {}
    # Distinguish tables by identity: inventories with equal tables share one decoded table.
    for table in {id(inventory.metas): inventory.metas for inventory in inventories}.values():
        for name, meta in table.items():
            add_meta(metas, name, meta)
    missing: dict[int, list[str]] = {}
    steps = {listing.step for inventory in inventories for listing in inventory.listings}
    for step in sorted(steps, reverse=True):
        holders = _holders(inventories, step)
        names = _expected(inventories, step)
        missing[step] = _missing(names, metas, holders)
        if not missing[step]:
            return ChosenStep(
                step=step,
                metas={name: metas[name] for name in names},
                holders=holders,
                values=_values(inventories, step),
            )
    raise _lost(missing)


def _holders(inventories: Sequence[Inventory], step: int) -> dict[str, dict[Chunk, list[int]]]:
    """Return the holders by name; tensors with the same holders share one dict."""
    held = [
        (rank, chunk, names)
        for rank, inventory in enumerate(inventories)
        for listing in inventory.listings
        if listing.step == step
        for chunk, names in groups_of(listing.chunks)
    ]
    sets = partition_names(names for _, _, names in held)
    found: dict[Names, dict[Chunk, list[int]]] = {}
    for rank, chunk, names in held:
        for together in sets[names]:
            ranks = found.setdefault(together, {}).setdefault(chunk, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    return {name: chunks for together, chunks in found.items() for name in together}


def _expected(inventories: Sequence[Inventory], step: int) -> list[str]:
    seen: dict[Names | frozenset[str], bool] = {}
    for inventory in inventories:
        for listing in inventory.listings:
            before = listing.step <= step
            named: list[Names | frozenset[str]] = [names for _, names in groups_of(listing.chunks)]
            for found in [*named, listing.elsewhere]:
                seen[found] = before or seen.get(found, False)
    names = {
        name for found, before in seen.items() for name in found if before or name.startswith(MODEL)
    }
    lasting = {name for name in names if not is_of_value(name)}
    if len(lasting) < len(names):
        # Plain values, and the tensors within them, may differ from step to step.
        lasting |= names & _named_at(inventories, step)
    return sorted(lasting)


def _named_at(inventories: Sequence[Inventory], step: int) -> set[str]:
    listings = [each for inventory in inventories for each in inventory.listings]
    return {
        name for each in listings if each.step == step for name in {*each.chunks, *each.elsewhere}
    }


def _missing(
    names: Sequence[str], metas: Mapping[str, Meta], holders: Mapping[str, Mapping[Chunk, object]]
) -> list[str]:
    found: list[str] = []
    gaps: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    no_chunks: Mapping[Chunk, object] = {}
    for name in names:
        if name not in metas:
            found.append(name)
        else:
            shape, chunks = metas[name].shape, holders.get(name, no_chunks)
            held = (id(chunks), shape)
            if held not in gaps:
                gaps[held] = _gaps(shape, chunks)
            found += [f"{name} {gap}" for gap in gaps[held]]
        if len(found) > MAX_NAMED:
            break
    return found


def _gaps(shape: tuple[int, ...], chunks: Mapping[Chunk, object]) -> list[str]:
    if Chunk.whole(shape) in chunks:
        return []
    grid = grid_of(shape, tuple(chunks))
    return [_in_brackets(gap) for gap in islice(grid.uncovered_cells(), MAX_NAMED + 1)]


def _in_brackets(chunk: Chunk) -> str:
    spans = zip(chunk.offsets, chunk.sizes, strict=True)
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in spans) + "]"


def _values(inventories: Sequence[Inventory], step: int) -> Mapping[str, Json]:
    listings = (each for inventory in inventories for each in inventory.listings)
    found = [each.values for each in listings if each.step == step and each.values]
    slots = merged(found)
    return {**(found[0] if found else {}), **({SLOTS: slots} if slots else {})}


def _lost(missing: Mapping[int, Sequence[str]]) -> StateLost:
    details = {
        str(step): ", ".join(parts[:MAX_NAMED]) + (", ..." if len(parts) > MAX_NAMED else "")
        for step, parts in missing.items()
    }
    newest = [f"at step {step} no member has {parts}" for step, parts in details.items()]
    return StateLost(
        "no step's state is whole on the remaining members",
        seen="; ".join(newest[:MAX_STEPS_NAMED]) or "members that hold nothing at all",
        expected="one step at which every element of every tensor is held by some member",
        fix="Continue from a checkpoint. To survive such a loss, keep more copies of the state in"
        " host memory.",
        details=details,
    )
