"""Sources of relays: by example, and for random relays with invariants."""

import random
from collections import Counter

import pytest

from shoal_server.core.publications.limits import HELD_S, MAX_CHILDREN, MAX_RELAYS
from shoal_server.core.publications.readers import ReaderReport, Readers
from shoal_server.core.publications.relays import SERVERS, RelayTrees

KEPT = range(1, 1000)


class Run:
    """Readers of one series, and their sources."""

    def __init__(self) -> None:
        self.readers, self.trees = Readers(), RelayTrees()
        self.now_s, self.sequence = 1000.0, 0

    def report(
        self,
        name: str,
        *leased: int,
        installed: int = 0,
        host: str | None = "",
        is_leaving: bool = False,
    ) -> dict[int, str]:
        """Report as a relay on `host`, by default on its own; None: as a reader, no relay."""
        self.sequence += 1
        report = ReaderReport(
            reader=name,
            leased=leased,
            installed=installed,
            serves_at="" if host is None else f"{host or name}:1",
            is_leaving=is_leaving,
            sequence=self.sequence,
        )
        self.readers.report(report, KEPT, self.now_s)
        return self.trees.sources(name, self.readers.known, self.now_s)

    def fetch(self, name: str, number: int = 1, host: str = "") -> str:
        return self.report(name, number, host=host)[number]


def test_the_servers_send_a_version_to_one_relay_which_has_at_most_two_children() -> None:
    run = Run()
    found = {f"r{i}": run.fetch(f"r{i}") for i in range(7)}
    assert found == {
        "r0": SERVERS,
        "r1": "r0",
        "r2": "r0",
        "r3": "r1",
        "r4": "r1",
        "r5": "r2",
        "r6": "r2",
    }


def test_a_relay_on_the_same_host_is_preferred_as_source() -> None:
    run = Run()
    for name, host in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        run.fetch(name, host=host)
    assert run.fetch("b1", host="b") == "b0"
    assert run.fetch("a2", host="a") == "a1"


def test_a_reader_that_is_no_relay_fetches_from_the_servers() -> None:
    run = Run()
    run.fetch("r0")
    assert run.report("plain", 1, host=None) == {1: SERVERS}
    assert {run.fetch("r1"), run.fetch("r2")} == {"r0"}


def test_a_relay_with_the_version_is_the_source_of_later_ones() -> None:
    """A new coordinator learns of it from its report. Children that have the version do not count
    towards the bound."""
    run = Run()
    assert run.report("r0", installed=1) == {}
    assert [run.fetch(f"r{i}") for i in (1, 2, 3)] == ["r0", "r0", "r1"]
    run.report("r1", installed=1)
    assert run.fetch("r4") == "r0"


def test_a_source_stays_the_same_during_a_lease() -> None:
    run = Run()
    run.fetch("r0")
    assert run.fetch("r1") == "r0"
    run.report("r0", installed=2)
    assert run.fetch("r1") == "r0"


@pytest.mark.parametrize(
    "go",
    [
        lambda run: run.report("r0", is_leaving=True),
        lambda run: run.report("r0", installed=2),
        lambda run: run.report("r0", 1, host=None),
        lambda run: setattr(run, "now_s", run.now_s + HELD_S),
    ],
    ids=["left", "has a newer one", "relays no more", "silent"],
)
def test_a_relay_without_the_version_is_no_source(go) -> None:  # type: ignore[no-untyped-def]
    run = Run()
    run.fetch("r0")
    go(run)
    assert run.fetch("r1") == SERVERS


def test_each_version_has_a_tree_of_its_own() -> None:
    run = Run()
    run.report("r0", installed=1)
    assert run.fetch("r1", 2) == SERVERS
    assert run.report("r0", 2, installed=1) == {2: "r1"}
    assert run.fetch("r2", 1) == "r0"


def test_relays_beyond_the_size_of_a_tree_fetch_from_servers() -> None:
    run = Run()
    found = [run.fetch(f"r{i}") for i in range(MAX_RELAYS + 1)]
    assert SERVERS not in found[1:-1]
    assert found[-1] == SERVERS


@pytest.mark.parametrize("seed", range(20))
def test_no_relay_has_too_many_children_or_waits_for_itself(seed: int) -> None:
    """Relays begin and repeat fetches, install versions, leave, and stop reporting."""
    chance, run = random.Random(seed), Run()
    names = [f"r{i}" for i in range(12)]
    fetching: dict[str, tuple[int, str, float]] = {}
    installed: Counter[str] = Counter()
    for _ in range(400):
        run.now_s += chance.choice((0.0, 0.1, 5.0))
        name, act = chance.choice(names), chance.random()
        if act < 0.1:
            run.report(name, is_leaving=True)
            fetching.pop(name, None)
            del installed[name]
        elif act < 0.5 and name in fetching:
            number, _, _ = fetching.pop(name)
            installed[name] = max(number, installed[name])
            run.report(name, installed=installed[name], host=name[-1])
        elif act < 0.9:
            number = fetching[name][0] if name in fetching else chance.randint(1, 3)
            source = run.report(name, number, installed=installed[name], host=name[-1])[number]
            if name in fetching and run.now_s < fetching[name][2] + HELD_S:
                assert source == fetching[name][1]
            fetching[name] = number, source, run.now_s
        # Leases of relays that have stopped reporting have ended.
        live = {n: f for n, f in fetching.items() if run.now_s < f[2] + HELD_S}
        children = Counter((number, source) for number, source, _ in live.values() if source)
        assert max(children.values(), default=0) <= MAX_CHILDREN, f"seed {seed}"
        for first, (number, _, _) in live.items():
            at, seen = first, {first}
            while at in live and live[at][0] == number and (at := live[at][1]):
                assert at not in seen, f"seed {seed}"
                seen.add(at)
