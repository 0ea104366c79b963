"""Whether what is on the servers is the serial replay of exactly the acknowledged pushes of rows.

Every push of a run is acknowledged in the end, each part with the version that it made: so the
versions of a shard are those from 2 on, each once. The replay is one `TableShard` on its own, which
gets the same pushes in that order: fates, births, values and what was seen on the way are the
same to the last bit, or the run is at fault.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from history.rows import Found, Pushed, RowClient, RowMember, RowWork
from support.models.table_specs import live, new_shard

from shoal_client.parameters.table_rows import Where, route
from shoal_server.parameters.tables.shard import TablePush, TableShard


class Replay:
    """One shard, served by nobody, that is pushed to in the order of the versions."""

    def __init__(self, work: RowWork, where: Where) -> None:
        self._where = where
        self._shard: TableShard = new_shard(work.table, where[1])
        self.version = 1

    def apply(self, pushed: Pushed) -> None:
        """Raises AssertionError if its version is not the next, or its fates are others here."""
        where = f"{self._where}: {pushed.session}#{pushed.sequence}"
        assert pushed.version == self.version + 1, (
            f"{where} made {pushed.version} behind {self.version}: one is lost, or applied twice"
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
        """Raises AssertionError unless the same rows are here, to the last bit."""
        expected = self._shard.read(partial(self._shard.body.look_up, found.ids))
        where = f"{self._where} at version {found.version}, {len(found.ids) // 8} rows"
        assert found.version == self.version, where
        assert found.births == expected.births, f"{where}: rows were made by other pushes"
        assert found.values == expected.values, f"{where}: values differ from the replay's"


def check(work: RowWork, *, all_sightings: bool = True) -> int:
    """Compare the servers' rows with the replay of the history; how many pushes of shards it has.

    Without `all_sightings`, what was seen on the way is left out: servers that all died at once may
    have shown what nobody was told to be durable. A last push brings optimizer state to light.
    """
    member = RowMember(work, "settle")
    try:
        member.client.push(range(work.num_ids), np.random.default_rng(0))
        last = everything(member.client, work)
    finally:
        member.close()
    return compare(work, last, all_sightings=all_sightings)


def everything(client: RowClient, work: RowWork) -> Mapping[Where, Found]:
    """All rows as they are now, by shard."""
    wanted, rows = client.look_up(range(work.num_ids))
    return {
        where: Found(version=r.version, ids=wanted[where], births=r.births, values=r.values)
        for where, r in rows.items()
    }


def compare(work: RowWork, last: Mapping[Where, Found], *, all_sightings: bool = True) -> int:
    """Replay the history of the run; `last` is what there is in the end."""
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
    """The shards in which there are ids."""
    return [(work.table.name, index) for index in route(range(work.num_ids), work.table.num_shards)]


def in_order(pushed: Sequence[Pushed]) -> list[Pushed]:
    return sorted(pushed, key=lambda each: each.version)


__all__ = ["Replay", "check", "compare", "everything"]
