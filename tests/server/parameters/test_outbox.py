"""A push that is waited for does not stand behind images, nor do images wait for ever."""

from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.parameters.image import Record
from shoal_server.parameters.outbox import Outbox


def record(version: int) -> Record:
    return Record(PushRecord(version=version), b"")


def sent(outbox: Outbox[str], at_most: int = 100) -> list[str]:
    """What leaves, each as its shard and, for a record, its version."""
    words = []
    while len(words) < at_most and (next_up := outbox.next()) is not None:
        copy, told = next_up
        words.append(copy if told is None else f"{copy} {told.push.version}")
    return words


def test_records_go_before_the_images_that_wait() -> None:
    outbox = Outbox[str]()
    for shard in ("a", "b", "c"):
        outbox.add_image(shard)
    assert sent(outbox, 1) == ["a"]
    outbox.add("a", record(2))
    outbox.add("a", record(3))
    assert sent(outbox) == ["a 2", "a 3", "b", "c"]


def test_images_go_on_while_records_come_without_end() -> None:
    outbox = Outbox[str]()
    for shard in ("a", "b"):
        outbox.add_image(shard)
    words = []
    for version in range(2, 8):
        outbox.add("x", record(version))
        words += sent(outbox, 1)
    assert words == ["x 2", "a", "x 3", "x 4", "b", "x 5"]
    assert sent(outbox) == ["x 6", "x 7"]


def test_what_was_applied_while_an_image_was_taken_comes_right_behind_it() -> None:
    outbox = Outbox[str]()
    outbox.add_image("a")
    outbox.add_image("b")
    assert sent(outbox, 1) == ["a"]
    outbox.add("a", record(5))
    for version in (4, 3):
        outbox.put_first("a", record(version))
    assert sent(outbox) == ["a 3", "a 4", "a 5", "b"]


def test_nothing_is_sent_of_what_was_cleared() -> None:
    outbox = Outbox[str]()
    outbox.add_image("a")
    outbox.add("b", record(2))
    assert [(copy, told.push.version) for copy, told in outbox.clear()] == [("b", 2)]
    assert sent(outbox) == []
