"""Publications and subscriptions: waits of a trainer, and results of a reader."""

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from support.weights.memory_series import MemoryReader, MemorySeries
from torch import Tensor, nn

from shoal.weights import series as series_module
from shoal.weights.pieces import HeldWeights, replicated_weights
from shoal.weights.reading import Installation
from shoal.weights.series import (
    PREPARING_NICENESS,
    PendingPublication,
    PreparedWriters,
    Publications,
    PublisherRank,
    SeriesOptions,
    held_state,
)
from shoal.weights.subscription import Subscription, Weights
from shoal.weights.version import WeightVersion
from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    DtypeMismatch,
    InvalidSpec,
    Overloaded,
    PublicationAbandoned,
    Regressed,
    ShapeMismatch,
    Unavailable,
    VersionGone,
)
from shoal_proto.segments.digests import chunk_digests
from shoal_proto.segments.sealed import SegmentWriter
from shoal_proto.v1.weights_pb2 import VersionRecord
from shoal_server.core.publications.limits import MAX_COPIES, MAX_KEEP

T = TypeVar("T")
ALONE = PublisherRank(number=1, rank=0, world_size=1)


@pytest.fixture
def series() -> MemorySeries:
    return MemorySeries()


@pytest.fixture
def publications(series: MemorySeries) -> Iterator[Publications]:
    found = Publications("job/policy", series.connect, SeriesOptions())
    yield found
    series.holds.set()
    found.close()


def model_of(number: float) -> dict[str, Tensor]:
    return {"w": torch.full((6, 3), number), "b": torch.full((5,), number), "n": torch.tensor(7)}


def held(number: float, step: int, rank: int = 0, world_size: int = 1) -> HeldWeights:
    own = {"step": step, "rank": rank, "world_size": world_size}
    return replicated_weights(model_of(number), {}, tied={}, **own)


def publish(publications: Publications, number: float, step: int) -> None:
    publications.publish(held(number, step), ALONE).wait("committed", 10)


def test_a_version_has_the_values_at_the_return_of_publish(
    series: MemorySeries, publications: Publications
) -> None:
    tensors = model_of(1.0)
    own = replicated_weights(tensors, {}, step=1, rank=0, world_size=1, tied={})
    series.holds.clear()
    ticket = publications.publish(own, ALONE)
    for tensor in tensors.values():
        tensor.zero_()
    series.holds.set()
    version = ticket.wait("committed", 10)
    assert version is not None
    assert (version.number, version.step, ticket.version) == (1, 1, 1)
    found = series.subscription().fetch()
    assert all(torch.equal(found[name], each) for name, each in model_of(1.0).items())


def test_tensors_of_all_kinds_arrive_as_they_were(
    series: MemorySeries, publications: Publications
) -> None:
    """Large tensors span several chunks."""
    embedding = torch.arange(5 * CHUNK_BYTES // 16 + 3, dtype=torch.int64)
    state = {
        "embedding": embedding,
        "tied": embedding,
        "large_complex": torch.randn(2 * CHUNK_BYTES // 8 + 1, dtype=torch.complex64).conj(),
        "large_transposed": torch.arange(2 * CHUNK_BYTES, dtype=torch.uint8).view(16, -1).t(),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(True),
        "mask": torch.tensor([True, False, True]),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "expanded": torch.tensor([3.0]).expand(4),
    }
    held = held_state(state, step=1, rank=0, world_size=1)
    publications.publish(held, ALONE).wait("committed", 20)
    [segment] = series.segments.values()
    assert segment.chunk_digests == chunk_digests(segment.view())
    target = {name: torch.zeros_like(each).contiguous() for name, each in state.items()}
    reader = series.subscription()
    found = reader.fetch()
    reader.fetch(into=target)
    for name, each in state.items():
        assert torch.equal(
            found[name].view(torch.uint8), each.resolve_conj().contiguous().view(torch.uint8)
        ), name
        assert torch.equal(target[name].view(torch.uint8), found[name].view(torch.uint8)), name


def test_ten_thousand_small_tensors_are_published_and_installed_in_a_moment(
    series: MemorySeries, publications: Publications
) -> None:
    state = {str(number): torch.full((2,), float(number)) for number in range(10_000)}
    target = {name: torch.zeros_like(each) for name, each in state.items()}
    held = held_state(state, step=1, rank=0, world_size=1)
    publications.publish(held, ALONE).wait("committed", 60)
    series.subscription().fetch(into=target)
    assert all(torch.equal(target[name], each) for name, each in state.items())


def test_more_publications_of_a_step_than_have_numbers_are_refused(
    series: MemorySeries, publications: Publications, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next number is the first of the next step, whose publication would look like a repeated
    one."""
    monkeypatch.setattr(series_module, "STEP_PUBLICATIONS", 2)
    for number in (1.0, 2.0):
        publish(publications, number, step=4)
    with pytest.raises(InvalidSpec, match="2 publications of step 4"):
        publish(publications, 3.0, step=4)
    publish(publications, 4.0, step=5)
    assert [record.step for record in series.records] == [4, 4, 5]
    assert len(series.parts) == 3


def test_ranks_parts_become_one_version_whichever_comes_first(series: MemorySeries) -> None:
    ranks = [Publications("job/policy", series.connect, SeriesOptions()) for _ in range(3)]
    tickets = [
        each.publish(held(2.0, 5, rank, 3), PublisherRank(number=1, rank=rank, world_size=3))
        for rank, each in reversed(list(enumerate(ranks)))
    ]
    versions = {ticket.wait("committed", 10) for ticket in tickets}
    assert len(versions) == 1
    found = series.subscription().fetch("newest")
    assert all(torch.equal(found[name], each) for name, each in model_of(2.0).items())
    for each in ranks:
        each.close()


def test_a_publication_of_a_lost_generation_is_abandoned(series: MemorySeries) -> None:
    """The next generation publishes at once, and gets the next number."""
    publications = Publications("job/policy", series.connect, SeriesOptions())
    lost = publications.publish(held(1.0, 1), PublisherRank(number=1, rank=0, world_size=2))
    found = publications.publish(held(2.0, 2), PublisherRank(number=2, rank=0, world_size=1))
    assert found.wait("committed", 10).number == 1
    with pytest.raises(PublicationAbandoned):
        lost.wait("committed", 10)
    publications.close()


def test_the_third_publication_waits_for_the_first(
    series: MemorySeries, publications: Publications
) -> None:
    place = PublisherRank(number=1, rank=0, world_size=2)
    series.holds.clear()
    for step in (1, 2):
        publications.publish(held(step, step, 0, 2), place)
    third = threading.Thread(target=publications.publish, args=(held(3.0, 3, 0, 2), place))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    series.failure = PublicationAbandoned("the other rank was lost")
    series.holds.set()
    third.join(10)
    assert not third.is_alive()


def test_a_publication_waits_no_longer_than_its_generation_lasts(series: MemorySeries) -> None:
    """The lost rank has added none of its parts. The survivor must reach its next step, where it
    enters the next generation; otherwise it counts as stuck."""
    publications = Publications("job/policy", series.connect, SeriesOptions())
    place = PublisherRank(number=1, rank=0, world_size=2)
    tickets = [publications.publish(held(step, step, 0, 2), place) for step in (1, 2)]
    is_over, found = threading.Event(), list[PendingPublication]()

    def publish() -> None:
        found.append(publications.publish(held(3.0, 3, 0, 2), place, is_over=is_over.is_set))

    third = threading.Thread(target=publish)
    third.start()
    third.join(0.3)
    assert third.is_alive()
    is_over.set()
    third.join(10)
    assert not third.is_alive()
    for ticket in (*tickets, *found):
        with pytest.raises(PublicationAbandoned):
            ticket.wait("committed", 10)
    after = publications.publish(held(4.0, 4), PublisherRank(number=2, rank=0, world_size=1))
    assert after.wait("committed", 10).number == 1
    publications.close()


def test_a_publication_does_not_wait_for_others_without_a_coordinator(
    series: MemorySeries, publications: Publications
) -> None:
    """Training goes on. The newest publication is committed once a coordinator is back."""
    is_away = threading.Event()
    series.holds.clear()
    before = publications.publish(held(1.0, 1), ALONE)
    threading.Timer(0.2, is_away.set).start()
    series.failure = Unavailable("the connection was closed")
    threading.Timer(0.4, series.holds.set).start()
    newest = publications.publish(held(2.0, 1), ALONE, is_away=is_away.is_set)
    with pytest.raises(PublicationAbandoned, match="without a coordinator"):
        before.wait("committed", 10)
    assert newest.publication > before.publication


@pytest.mark.parametrize("fails_at", ["", "prepare", "seal"])
def test_a_publication_dropped_without_a_coordinator_is_reported_before_the_next_one(
    series: MemorySeries, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Another rank that has reached the coordinator in time still waits for its parts, also if the
    next one fails."""
    publications = Publications("job/policy", series.connect, SeriesOptions())
    place = PublisherRank(number=1, rank=0, world_size=2)
    before = [publications.publish(held(step, step, 0, 2), place) for step in (1, 2)]

    def fail(*args: object) -> SegmentWriter:
        raise Overloaded("memory is short")

    if fails_at:
        monkeypatch.setattr(SegmentWriter, fails_at, fail)
    expected: AbstractContextManager[object] = nullcontext()
    if fails_at == "prepare":
        expected = pytest.raises(Overloaded)
    with expected:
        newest = publications.publish(held(3.0, 3, 0, 2), place, is_away=lambda: True)
        assert fails_at or not newest.is_over
    reported = [series.reported_failures.get(timeout=10) for _ in before]
    assert [number for number, _ in reported] == [each.publication for each in before]
    publications.close(waits=False)


def test_publications_dropped_in_a_long_outage_are_all_reported_after_it(
    series: MemorySeries, publications: Publications
) -> None:
    """Servers hold the parts of the first ones, which would leave no space for later parts. The
    publication that replaced them is dropped itself."""
    place = PublisherRank(number=1, rank=0, world_size=2)
    series.holds.clear()
    tickets = [
        publications.publish(held(step, step, 0, 2), place, is_away=lambda: True)
        for step in range(1, 6)
    ]
    series.holds.set()
    reported = [series.reported_failures.get(timeout=10)[0] for _ in tickets[:4]]
    assert reported == [each.publication for each in tickets[:4]]
    assert not tickets[4].is_over
    publications.close(waits=False)


@pytest.mark.parametrize("call", ["prepare", "seal"])
def test_a_failure_before_a_part_is_sent_is_reported(
    series: MemorySeries,
    publications: Publications,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """The other ranks wait for the part."""

    def fail(*args: object) -> SegmentWriter:
        raise Overloaded("memory is short")

    monkeypatch.setattr(SegmentWriter, call, fail)
    place = PublisherRank(number=1, rank=0, world_size=2)
    with pytest.raises(Overloaded):
        publications.publish(held(1.0, 1, 0, 2), place).wait("committed", 10)
    publication, failure = series.reported_failures.get(timeout=10)
    assert publication == 1 * series_module.STEP_PUBLICATIONS + 1
    assert isinstance(failure, Overloaded)


@pytest.mark.parametrize("closes", [False, True])
def test_a_wait_for_a_publication_ends_with_its_generation(
    series: MemorySeries, *, closes: bool
) -> None:
    """A trainer that waits between two steps must reach its next step, as above. At the end of a
    session it must leave."""
    publications = Publications("job/policy", series.connect, SeriesOptions())
    place = PublisherRank(number=1, rank=0, world_size=2)
    is_over = threading.Event()
    tickets = [
        publications.publish(held(step, step, 0, 2), place, is_over=is_over.is_set)
        for step in (1, 2)
    ]
    threading.Timer(0.2, is_over.set).start()
    begun_s = time.monotonic()
    if closes:
        publications.close()
    for ticket in tickets:
        with pytest.raises(PublicationAbandoned, match="generation, or its session, ended"):
            ticket.wait("committed", 20)
    assert time.monotonic() - begun_s < 10
    after = publications.publish(held(3.0, 2), PublisherRank(number=2, rank=0, world_size=1))
    assert after.wait("committed", 10).number == 1
    publications.close()


def test_a_publication_that_one_rank_alone_makes_delays_no_later_one(series: MemorySeries) -> None:
    """A member that joins late does so: its first publication is abandoned once a later one is
    complete."""
    ranks = [Publications("job/policy", series.connect, SeriesOptions()) for _ in range(2)]
    places = [PublisherRank(number=1, rank=rank, world_size=2) for rank in range(2)]
    ranks[1].publish(held(1.0, 1, 1, 2), places[1])
    tickets = [each.publish(held(2.0, 2, rank, 2), places[rank]) for rank, each in enumerate(ranks)]
    for ticket in tickets:
        assert ticket.wait("committed", 20).step == 2
    for each in ranks:
        each.close()


def test_memory_for_the_next_version_is_allocated_with_lower_priority(
    publications: Publications, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, niceness = SegmentWriter.prepare, {}

    def noted(num_bytes: int) -> SegmentWriter:
        thread = threading.current_thread()
        niceness[thread.name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return prepare(num_bytes)

    monkeypatch.setattr(SegmentWriter, "prepare", noted)
    publish(publications, 1.0, step=1)
    publications.close()
    usual = niceness[threading.current_thread().name]
    assert niceness["prepare-segment"] == min(usual + PREPARING_NICENESS, 19)


def test_memory_is_prepared_for_one_segment_at_a_time_and_freed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two publications in progress ask at once; the first preparation takes longer. A publication
    that goes on after the end prepares nothing."""
    prepare, goes_on, made = SegmentWriter.prepare, threading.Event(), list[SegmentWriter]()

    def slow(num_bytes: int) -> SegmentWriter:
        assert goes_on.wait(10)
        made.append(prepare(num_bytes))
        return made[-1]

    monkeypatch.setattr(SegmentWriter, "prepare", slow)
    writers = PreparedWriters()
    for _ in range(2):
        writers.prepare(64)
    preparing = [each for each in threading.enumerate() if each.name == "prepare-segment"]
    goes_on.set()
    writers.close()
    writers.prepare(64)
    for each in (*preparing, *threading.enumerate()):
        if each.name == "prepare-segment":
            each.join(10)
    assert [len(writer.buffer) for writer in made] == [0]


def test_a_segment_is_taken_without_a_thread_that_prepares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 starts no thread once the script has ended, and publications end later."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    writers = PreparedWriters()
    writers.prepare(100)
    writers.take(100).close()
    writers.close()


def test_a_ticket_raises_the_error_of_its_publication(
    series: MemorySeries, publications: Publications
) -> None:
    series.failure = Overloaded("the server has no room")
    ticket = publications.publish(held(1.0, 1), ALONE)
    for level in ("replicated", "committed"):
        with pytest.raises(Overloaded):
            ticket.wait(level, 10)  # type: ignore[arg-type]
    assert isinstance(ticket.failure, Overloaded)


def test_a_ticket_waits_no_longer_than_its_timeout(
    series: MemorySeries, publications: Publications
) -> None:
    series.holds.clear()
    ticket = publications.publish(held(1.0, 1), ALONE)
    with pytest.raises(DeadlineExceeded, match="not committed yet"):
        ticket.wait("committed", 0.05)
    with pytest.raises(InvalidSpec, match="no such level"):
        ticket.wait("written")  # type: ignore[arg-type]
    for timeout in (math.nan, "1 s"):
        with pytest.raises(InvalidSpec, match="timeout is not a number"):
            ticket.wait("committed", timeout)  # type: ignore[arg-type]


def test_a_ticket_looks_for_a_durable_version_no_longer_than_it_is_told() -> None:
    """Each look gets less time than the whole wait: without a coordinator, a look takes all the
    time that it gets."""
    limits: list[float] = []
    record = VersionRecord(number=3)

    def look(number: int, timeout_s: float) -> WeightVersion:
        limits.append(timeout_s)
        return WeightVersion(record)

    ticket = PendingPublication(1, 1, look)
    ticket.committed(record)
    with pytest.raises(DeadlineExceeded, match="not durable yet"):
        ticket.wait("durable", 0.25)
    assert limits
    assert all(0.0 < each < 0.25 for each in limits)


def test_publications_of_one_step_have_numbers_of_their_own(
    series: MemorySeries, publications: Publications
) -> None:
    tickets = [publications.publish(held(1.0, step), ALONE) for step in (4, 4, 5)]
    numbers = [each.publication for each in tickets]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("options", [{"keep": 0}, {"copies": 0}, {"keep": True}, {"copies": 99}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidSpec, match=r"(keep|copies) is (out of range|not an integer)"):
        SeriesOptions(**options)


@pytest.mark.parametrize(("name", "most"), [("keep", MAX_KEEP), ("copies", MAX_COPIES)])
def test_options_that_the_coordinator_would_refuse_are_refused_at_once(
    name: str, most: int
) -> None:
    SeriesOptions(**{name: most})
    with pytest.raises(InvalidSpec, match=f"{name} is out of range"):
        SeriesOptions(**{name: most + 1})


def test_large_metadata_are_refused(publications: Publications) -> None:
    with pytest.raises(InvalidSpec, match="metadata is too large"):
        publications.publish(held(1.0, 1), ALONE, {"text": "x" * 5000})


def test_metadata_that_no_message_can_carry_are_refused(publications: Publications) -> None:
    for many in ({str(n): n for n in range(65)}, {"k" * 257: 1}):
        with pytest.raises(InvalidSpec, match="too many entries, or too long a key"):
            publications.publish(held(1.0, 1), ALONE, many)
    with pytest.raises(InvalidSpec, match="metadata is not text"):
        publications.publish(held(1.0, 1), ALONE, {"text": "\udcff"})


def test_a_state_dict_of_a_module_is_published_under_all_its_names(
    series: MemorySeries, publications: Publications
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)})
    model["b"].weight = model["a"].weight
    publications.publish(held_state(model, step=1, rank=0, world_size=1), ALONE).wait(timeout=10)
    found = series.subscription().fetch()
    assert found.keys() == model.state_dict().keys()
    assert found["a.weight"] is found["b.weight"]
    assert sum(series.layouts[series.records[0].layout_digest].segment_bytes) < 700


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("w", torch.empty(6, 3, device="meta"), "meta device"),
        ("w", torch.zeros(6, 3).to_sparse(), "sparse"),
        (7, torch.zeros(3), "name"),
        ("w\ud800", torch.zeros(3), "name"),
    ],
    ids=["meta", "sparse", "number", "surrogate"],
)
def test_tensors_without_bytes_or_name_are_refused(
    series: MemorySeries,
    publications: Publications,
    name: str,
    tensor: Tensor,
    reason: str,
) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        own = held_state({name: tensor}, step=1, rank=0, world_size=1)
        publications.publish(own, ALONE)
    publish(publications, 1.0, 1)
    assert len(series.records) == 1


# --- readers ---


def test_a_reader_installs_into_a_module_and_reports_what_arrived(
    series: MemorySeries, publications: Publications
) -> None:
    source, target = nn.Linear(4, 3), nn.Linear(4, 3)
    publications.publish(held_state(source, step=9, rank=0, world_size=1), ALONE).wait(timeout=10)
    with series.subscription() as subscription:
        weights = subscription.fetch(into=target)
        assert torch.equal(target.weight, source.weight)
        assert (subscription.version, weights.version.step) == (1, 9)
    assert series.reports == [(1, series.records[0].digest)]
    assert series.leases == set()


def test_a_reader_with_half_precision_gets_converted_numbers(
    series: MemorySeries, publications: Publications
) -> None:
    publish(publications, 1.25, 1)
    target = {"w": torch.zeros(6, 3).half(), "b": torch.zeros(5).bfloat16(), "n": torch.tensor(0)}
    series.subscription().fetch(into=target)
    assert target["w"].unique().tolist() == [1.25]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"w": torch.zeros(3, 6)}, ShapeMismatch),
        ({"w": torch.zeros(6, 3, dtype=torch.int64)}, DtypeMismatch),
        ({"w": torch.empty(6, 3, dtype=torch.float4_e2m1fn_x2)}, DtypeMismatch),
        ({"more": torch.zeros(1)}, InvalidSpec),
        ({"w": "text"}, InvalidSpec),
    ],
)
def test_targets_that_do_not_fit_are_refused_and_nothing_changes(
    series: MemorySeries, publications: Publications, change: dict[str, Tensor], error: type
) -> None:
    publish(publications, 4.0, 1)
    target = {**model_of(0.0), **change}
    with pytest.raises(error):
        series.subscription().fetch(into=target)
    assert not target["b"].any()
    assert series.reports == []


@pytest.mark.parametrize(
    ("unfit", "reason"),
    [
        (torch.empty(6, 3, device="meta"), "meta device"),
        (torch.zeros(1, 3).expand(6, 3), "share memory"),
        (torch.zeros(6, 3).to_sparse(), "sparse"),
    ],
    ids=["meta", "expanded", "sparse"],
)
def test_a_tensor_that_cannot_be_written_is_refused_and_nothing_changes(
    series: MemorySeries, publications: Publications, unfit: Tensor, reason: str
) -> None:
    """Writing to a meta tensor would do nothing, and the version would be reported as served."""
    publish(publications, 4.0, 1)
    target = {"b": torch.zeros(5), "n": torch.tensor(0), "w": unfit}
    with pytest.raises(InvalidSpec, match=f"to w: .*{reason}"):
        series.subscription().fetch(into=target)
    assert not target["b"].any()
    assert series.reports == []


def test_tensors_made_in_inference_mode_are_installed(
    series: MemorySeries, publications: Publications
) -> None:
    """Engines make their models in inference mode."""
    publish(publications, 4.0, 1)
    with torch.inference_mode():
        target = model_of(0.0)
    series.subscription().fetch(into=target)
    assert target["w"].unique().tolist() == [4.0]


def test_other_versions_than_a_number_or_newest_are_refused(
    series: MemorySeries, publications: Publications
) -> None:
    publish(publications, 4.0, 1)
    for wanted in ("latest", 1.5, None):
        with pytest.raises(InvalidSpec, match="version"):
            series.subscription().fetch(wanted)  # type: ignore[arg-type]


def test_a_reader_never_goes_back(series: MemorySeries, publications: Publications) -> None:
    for number in (1.0, 2.0):
        publish(publications, number, int(number))
    subscription, target = series.subscription(), model_of(0.0)
    subscription.fetch(into=target)
    with pytest.raises(Regressed, match="version 2 installed"):
        subscription.fetch(1, into=target)
    old = subscription.fetch(1)
    assert old["b"].unique().tolist() == [1.0]
    with pytest.raises(Regressed):
        subscription.installed(old)
    assert target["b"].unique().tolist() == [2.0]


def test_weights_whose_tables_were_released_cannot_be_installed(
    series: MemorySeries, publications: Publications
) -> None:
    """The next changes would be all rows, without removed ones."""
    publish(publications, 1.0, 1)
    subscription = Subscription(series.reader(), "job/policy", tables=True)  # type: ignore[arg-type]
    with Weights(WeightVersion(series.records[0]), {}) as weights:
        pass
    with pytest.raises(InvalidSpec, match="within their `with` block"):
        subscription.installed(weights)
    assert subscription.version == 0
    assert series.reports == []


def test_a_version_that_is_not_kept_is_gone(
    series: MemorySeries, publications: Publications
) -> None:
    subscription = series.subscription()
    with pytest.raises(VersionGone, match="no version yet"):
        subscription.fetch()
    publish(publications, 1.0, 1)
    with pytest.raises(VersionGone, match="kept: 1 to 1"):
        subscription.fetch(7)  # waits for a moment, as the version may be on its way


def test_the_newest_version_is_fetched_although_the_view_is_late(
    series: MemorySeries, publications: Publications
) -> None:
    """The publisher has been told of its commit, and has told this process in its own way."""
    subscription, target = series.subscription(), model_of(0.0)
    for number in (1, 2, 3):
        publish(publications, float(number), number)
        series.num_late = 1
        assert subscription.fetch(into=target).version.step == number
    assert target["w"].unique().tolist() == [3.0]
    assert series.leases == set()


def test_a_version_that_its_publisher_knows_of_first_is_waited_for(
    series: MemorySeries, publications: Publications
) -> None:
    publish(publications, 1.0, 1)
    subscription = series.subscription()
    later = threading.Timer(0.2, publish, args=(publications, 2.0, 2))
    later.start()
    assert subscription.fetch(2).version.step == 2
    later.join()


def test_bytes_that_are_not_the_published_ones_are_never_installed(
    series: MemorySeries, publications: Publications
) -> None:
    """The servers return another version's segments under this one's record."""
    for number in (1.0, 2.0):
        publish(publications, number, int(number))
    first, second = (record.segments[0].digest for record in series.records)
    series.segments[second] = series.segments[first]
    subscription, target = series.subscription(), model_of(0.0)
    with pytest.raises(ChecksumMismatch):
        subscription.fetch(into=target)
    assert not target["w"].any()


def test_a_version_that_failed_verification_is_no_base_of_the_next(
    series: MemorySeries, publications: Publications
) -> None:
    for number in (1.0, 2.0):
        publish(publications, number, int(number))
    first, second = (record.segments[0].digest for record in series.records)
    series.segments[second] = series.segments[first]
    reader = series.reader()
    subscription = Subscription(reader, "job/policy")  # type: ignore[arg-type]
    with pytest.raises(ChecksumMismatch):
        subscription.fetch()
    publish(publications, 3.0, 3)
    assert subscription.fetch().version.step == 3
    assert reader.bases == [None, None]


def test_writing_to_a_fetched_tensor_changes_no_other_readers(
    series: MemorySeries, publications: Publications
) -> None:
    publish(publications, 1.0, 1)
    first = series.subscription().fetch()
    first["w"].zero_()
    assert series.subscription().fetch()["w"].unique().tolist() == [1.0]


def test_versions_in_between_are_skipped(series: MemorySeries, publications: Publications) -> None:
    publish(publications, 1.0, 1)
    versions = iter(series.subscription())
    assert next(versions).number == 1
    for number in (2.0, 3.0):
        publish(publications, number, int(number))
    assert next(versions).number == 3


def test_a_wait_ends_at_its_limit(series: MemorySeries) -> None:
    with pytest.raises(DeadlineExceeded):
        series.subscription().wait(timeout=0.05)
    with pytest.raises(InvalidSpec, match="timeout is not a number"):
        series.subscription().wait(timeout=math.nan)


async def test_a_stream_gives_each_version_that_is_kept(
    series: MemorySeries, publications: Publications
) -> None:
    for number in (1.0, 2.0, 3.0):
        publish(publications, number, int(number))
    found = []
    async for version in series.subscription().stream(every=1):
        found.append(version.number)
        if len(found) == 3:
            publish(publications, 4.0, 4)
        if len(found) == 4:
            break
    assert found == [1, 2, 3, 4]


async def test_a_stream_leaves_out_versions_that_were_dropped_meanwhile(
    series: MemorySeries, publications: Publications
) -> None:
    """Further versions are published while the caller works on one, and older ones dropped."""
    for number in range(1, 5):
        publish(publications, float(number), number)
    found = []
    async for version in series.subscription().stream(every=2):
        found.append((await series.subscription().fetch_async(version)).version.number)
        if found == [2]:
            for number in range(5, 11):
                publish(publications, float(number), number)
            series.dropped = 7
        if found[-1] == 10:
            break
    assert found == [2, 8, 10]


@dataclass
class Gate:
    """A call that waits until `goes_on` is set."""

    is_reached: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def before(self, call: Callable[..., T]) -> Callable[..., T]:
        def made(*args: Any, **options: Any) -> T:
            self.is_reached.set()
            assert self.goes_on.wait(10)
            return call(*args, **options)

        return made


async def test_a_cancelled_fetch_installs_nothing(
    series: MemorySeries, publications: Publications, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on until the next chunk arrives."""
    publish(publications, 1.0, 1)
    subscription, target, gate = series.subscription(), model_of(0.0), Gate()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryReader, "fetch", gate.before(MemoryReader.fetch))
        fetching = asyncio.create_task(subscription.fetch_async(into=target))
        assert await asyncio.to_thread(gate.is_reached.wait, 10)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        gate.goes_on.set()
    found = await asyncio.wait_for(subscription.fetch_async(), 10)  # after the first one's thread
    assert found["w"].unique().tolist() == [1.0]
    assert target["w"].unique().tolist() == [0.0]
    assert subscription.version == 0
    assert series.reports == []


async def test_an_installation_that_has_begun_is_finished_before_the_fetch_is_cancelled(
    series: MemorySeries, publications: Publications, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(publications, 1.0, 1)
    subscription, target, gate = series.subscription(), model_of(0.0), Gate()
    monkeypatch.setattr(Installation, "write", gate.before(Installation.write))
    fetching = asyncio.create_task(subscription.fetch_async(into=target))
    assert await asyncio.to_thread(gate.is_reached.wait, 10)
    fetching.cancel()
    done, _ = await asyncio.wait([fetching], timeout=0.1)
    assert not done
    gate.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert target["w"].unique().tolist() == [1.0]
    assert subscription.version == 1


async def test_an_event_loop_goes_on_while_a_reader_waits(
    series: MemorySeries, publications: Publications
) -> None:
    subscription = series.subscription()
    waiting = asyncio.create_task(subscription.wait_async(timeout=10))
    await asyncio.sleep(0.01)
    publish(publications, 1.0, 1)
    assert (await waiting).number == 1
    assert (await subscription.fetch_async())["w"].unique().tolist() == [1.0]
    with pytest.raises(DeadlineExceeded):
        await subscription.wait_async(newer_than=1, timeout=0.05)
