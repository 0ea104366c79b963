"""Check that the servers' rows are the serial replay of exactly the acknowledged pushes of rows.

Every push of a run is acknowledged in the end, each part with the version that it made. So the
parts' versions in a shard are 2, 3, 4 ..., each once. The replay is one `TableShard` without a
server, to which the same pushes are applied in that order. Fates, births, values and all rows seen
on the way must be the same to the last bit.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from history.rows import Found, Pushed, RowClient, RowMember, RowWork
from support.models.table_specs import live, new_shard

from shoal_client.parameters.table_rows import Where, route
from shoal_server.parameters.tables.shard import TablePush, TableShard


class Replay:
    """A shard without a server, to which pushes are applied in the order of their versions."""

    def __init__(self, work: RowWork, where: Where) -> None:
        self._where = where
        self._shard: TableShard = new_shard(work.table, where[1])
        self.version = 1

    def apply(self, pushed: Pushed) -> None:
        """Apply the next push. Raises AssertionError if its version is not the next one, or if its
        fates differ here."""
        where = f"{self._where}: {pushed.session}#{pushed.sequence}"
        assert pushed.version == self.version + 1, (
            f"{where} made {pushed.version} after {self.version}: one is lost, or applied twice"
        )
        outcome = self._shard.push(
            TablePush(
                session=pushed.session,
                sequence=pushed.sequence,
                epoch=1,
                base_version=1,
                step=0,
                lr=None,
                row_ids=pushed.ids,
                births=pushed.births,
                gradient=pushed.gradients,
                at_unix_s=1e9,
            ),
            live,
        )
        assert outcome.fates == pushed.fates, f"{where}: other fates than the replay's"
        self.version = outcome.version

    def compare(self, found: Found) -> None:
        """Raise AssertionError unless the replay has the same rows, to the last bit."""
        expected = self._shard.read(partial(self._shard.body.look_up, found.ids))
        where = f"{self._where} at version {found.version}, {len(found.ids) // 8} rows"
        assert found.version == self.version, where
        assert found.births == expected.births, f"{where}: rows were made by other pushes"
        assert found.values == expected.values, f"{where}: values differ from the replay's"


def check(work: RowWork, *, all_sightings: bool = True) -> int:
    """Compare the servers' rows with the replay of the history; return the number of parts in it.

    Without `all_sightings`, rows seen during the run are left out: servers that all died at once
    may have shown updates that were never acknowledged as durable. A last push makes the optimizer
    state visible in the values.
    """
    member = RowMember(work, "settle")
    try:
        member.client.push(range(work.num_ids), np.random.default_rng(0))
        last = everything(member.client, work)
    finally:
        member.close()
    return compare(work, last, all_sightings=all_sightings)


def everything(client: RowClient, work: RowWork) -> Mapping[Where, Found]:
    """Look up all rows, by shard."""
    wanted, rows = client.look_up(range(work.num_ids))
    return {
        where: Found(version=r.version, ids=wanted[where], births=r.births, values=r.values)
        for where, r in rows.items()
    }


def compare(work: RowWork, last: Mapping[Where, Found], *, all_sightings: bool = True) -> int:
    """Replay the history of the run; `last` are the rows at its end. Return the number of parts."""
    history, num_pushed = work.history, 0
    for where in shards_of(work):
        sightings: dict[int, list[Found]] = {}
        for found in history.found.get(where, ()) if all_sightings else ():
            sightings.setdefault(found.version, []).append(found)
        replay = Replay(work, where)
        for pushed in [None, *in_order(history.pushed.get(where, ()))]:
            if pushed is not None:
                replay.apply(pushed)
                num_pushed += 1
            for found in sightings.pop(replay.version, ()):
                replay.compare(found)
        assert not sightings, f"{where}: versions {sorted(sightings)} were seen and are no more"
        replay.compare(last[where])
    return num_pushed


def shards_of(work: RowWork) -> list[Where]:
    """The shards that have ids."""
    return [(work.table.name, index) for index in route(range(work.num_ids), work.table.num_shards)]


def in_order(pushed: Sequence[Pushed]) -> list[Pushed]:
    return sorted(pushed, key=lambda each: each.version)


__all__ = ["Replay", "check", "compare", "everything"]
