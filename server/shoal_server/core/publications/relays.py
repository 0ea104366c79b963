"""Trees of relays, one tree for each version.

A new relay fetches from another relay that has or fetches the version and serves fewer than
MAX_CHILDREN relays, if there is one. So the servers send a version about once for up to MAX_RELAYS
relays. A relay whose source fails continues from the servers.
"""

from collections import Counter
from collections.abc import Mapping

from shoal_server.core.publications.limits import HELD_S, MAX_CHILDREN, MAX_RELAYS
from shoal_server.core.publications.readers import Reader

SERVERS = ""
"""Source that stands for the parameter servers."""

_Tree = dict[str, str | None]
"""Source of each relay, in order of arrival; None for a relay that has the whole version."""


class RelayTrees:
    def __init__(self) -> None:
        self._trees: dict[int, _Tree] = {}

    def sources(self, name: str, readers: Mapping[str, Reader], now_s: float) -> dict[int, str]:
        """The source of each version that a reader leases: the id of a relay, or SERVERS.

        Call it after each report of the reader. A source stays the same as long as the lease.
        """
        self._forget_gone(readers, now_s)
        reader = readers.get(name)
        if reader is None:
            return {}
        if not reader.report.serves_at:
            return dict.fromkeys(reader.leases, SERVERS)
        if reader.report.installed:
            self._join(reader.report.installed, name, None)
        return {number: self._source(number, name, readers) for number in reader.leases}

    def _forget_gone(self, readers: Mapping[str, Reader], now_s: float) -> None:
        for number, tree in list(self._trees.items()):
            for name in list(tree):
                reader = readers.get(name)
                is_live = reader is not None and now_s < reader.seen_s + HELD_S
                if reader is None or not is_live or not reader.report.serves_at:
                    del tree[name]
                elif number not in reader.leases:
                    if reader.report.installed == number:
                        tree[name] = None
                    else:
                        del tree[name]
            if not tree:
                del self._trees[number]

    def _source(self, number: int, name: str, readers: Mapping[str, Reader]) -> str:
        tree = self._trees.get(number, {})
        source = tree.get(name)
        if source is None:
            may_join = name in tree or len(tree) < MAX_RELAYS
            source = self._chosen(tree, name, readers) if may_join else SERVERS
            self._join(number, name, source)
        return source

    def _chosen(self, tree: _Tree, name: str, readers: Mapping[str, Reader]) -> str:
        num_children = Counter(source for source in tree.values() if source)
        free = [
            each
            for each in tree
            if num_children[each] < MAX_CHILDREN and not _waits_for(tree, each, name)
        ]
        host = _host(readers[name])
        return next((e for e in free if _host(readers[e]) == host), free[0] if free else SERVERS)

    def _join(self, number: int, name: str, source: str | None) -> None:
        tree = self._trees.setdefault(number, {})
        if source is not None and name in tree:
            tree[name] = source
        elif len(tree) < MAX_RELAYS:
            tree.setdefault(name, source)


def _waits_for(tree: _Tree, relay: str | None, other: str) -> bool:
    while relay:
        if relay == other:
            return True
        relay = tree.get(relay)
    return False


def _host(reader: Reader) -> str:
    return reader.report.serves_at.rpartition(":")[0]
