"""Checkpoints in buckets: in fsspec's memory, and in a server that speaks S3."""

import errno
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import fsspec
import pytest
import s3fs
import torch.distributed.checkpoint as dcp
from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from support.members.thread_members import lone
from support.models.checkpoint_world import cut, differences, on_all, trained, with_aliases
from support.training.elastic_bodies import build
from support.training.elastic_bodies import numbers as data
from torch.nn.functional import cross_entropy

import shoal
from shoal.checkpoint.background import Checkpoints
from shoal.checkpoint.bucket_paths import BucketPath, located
from shoal.checkpoint.directory import METADATA
from shoal.checkpoint.reading import read
from shoal.checkpoint.storage import complete
from shoal.checkpoint.writing import write
from shoal.state.shards import StateShard, whole_chunk
from shoal.strategies.synchronous.generation_checkpoints import GenerationCheckpoints
from shoal.strategies.synchronous.script_position import ScriptPosition
from shoal.torch_private.checkpoint import FsspecReader
from shoal_client.local.cluster import LocalCluster
from shoal_proto.errors import CheckpointFailed, InvalidSpec, MalformedMessage, Unavailable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of a bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", settings)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(**settings).makedirs("shoal-test", exist_ok=True)
        yield "s3://shoal-test"
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["memory", "s3"])
def place(request: pytest.FixtureRequest) -> str:
    """The URL of an empty location for checkpoints."""
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://bucket"
    return f"{root}/{secrets.token_hex(4)}/runs"


def at(step: int, number: int = 2) -> StateShard:
    given = trained("sgd", number)
    return StateShard(step=step, shards=given.shards, values=given.values)


def paths_in(place: str) -> list[str]:
    path = located(place)
    assert isinstance(path, BucketPath)
    return path.names()


@pytest.mark.sampled()
def test_three_ranks_write_a_checkpoint_that_one_process_reads(place: str) -> None:
    whole = trained("adamw")

    def act(peers: Any) -> None:
        with Checkpoints(place, every_steps=1) as checkpoints:
            checkpoints.begin_write(cut(whole, 0, peers.rank, 3), peers)

    assert on_all(3, act) == [None] * 3
    newest = Checkpoints(place, every_steps=1).newest()
    assert str(newest) == f"{place}/step-00000003"
    assert newest is not None
    assert differences(read(newest, whole_chunk), with_aliases(whole)) == []
    assert len(paths_in(place)) == 4, "a file of each rank, the index, and nothing else"


def test_plain_torch_reads_a_checkpoint_in_a_bucket(place: str) -> None:
    whole = trained("sgd")
    with Checkpoints(place, every_steps=1) as checkpoints:
        checkpoints.begin_write(whole)
    model, _ = build_of(whole)
    dcp.load({"model": model}, storage_reader=FsspecReader(str(checkpoints.newest())), no_dist=True)
    assert all((model[name] == tensor).all() for name, tensor in expected_of(whole).items())


def expected_of(whole: StateShard) -> dict[str, Any]:
    return {
        name.removeprefix("model."): shard.tensor
        for name, shard in with_aliases(whole).shards.items()
        if name.startswith("model.")
    }


def build_of(whole: StateShard) -> tuple[dict[str, Any], None]:
    return {name: tensor.clone().zero_() for name, tensor in expected_of(whole).items()}, None


@pytest.mark.sampled()
def test_the_newest_checkpoints_are_kept_and_the_same_step_is_replaced(place: str) -> None:
    with Checkpoints(place, every_steps=10, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.begin_write(at(step))
        checkpoints.begin_write(at(30, 3))
    assert sorted(complete(located(place))) == [20, 30]
    newest = checkpoints.newest()
    assert newest is not None
    assert differences(read(newest, whole_chunk), with_aliases(at(30, 3))) == []
    assert len(paths_in(place)) == 2 * 2


def test_checkpoints_are_listed_without_a_request_for_each(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with hundreds of checkpoints has seconds to name them when it is continued."""
    with Checkpoints(place, every_steps=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.begin_write(at(step))

    def refuse(path: BucketPath) -> int:
        raise AssertionError(f"a request for {path}")

    monkeypatch.setattr(BucketPath, "size", refuse)
    assert sorted(complete(located(place))) == [1, 2, 3]


@pytest.mark.sampled()
def test_a_run_that_starts_over_is_refused_beside_later_steps_of_another_run(place: str) -> None:
    with Checkpoints(place, every_steps=1) as checkpoints:
        checkpoints.begin_write(at(100))
    again = Checkpoints(place, every_steps=1)
    again.begin_write(at(1))
    with pytest.raises(
        InvalidSpec, match="run that had taken more steps than this one; saw step 100"
    ):
        again.finish_write()
    assert len(paths_in(place)) == 2


def test_ranks_that_do_not_share_their_storage_are_refused(place: str) -> None:
    whole = at(1)

    def act(peers: Any) -> None:
        own = place if peers.rank == 0 else f"{place}-of-another"
        with Checkpoints(own, every_steps=1) as checkpoints:
            checkpoints.begin_write(cut(whole, 0, peers.rank, 2), peers)

    errors = on_all(2, act)
    assert [type(error) for error in errors] == [InvalidSpec] * 2
    assert "rank 1 does not see" in str(errors[0])
    assert paths_in(place) == []


def test_a_checkpoint_that_lacks_a_file_is_refused(place: str) -> None:
    with Checkpoints(place, every_steps=1) as checkpoints:
        checkpoints.begin_write(at(1))
    newest = checkpoints.newest()
    assert isinstance(newest, BucketPath)
    (file,) = (name for name in newest.names() if name.endswith(".distcp"))
    newest.remove([file])
    with pytest.raises(MalformedMessage, match=f"truncated; saw no file {file}"):
        read(newest, whole_chunk)


def test_a_damaged_index_of_an_old_checkpoint_fails_no_later_one(place: str) -> None:
    """The files stay: the index does not say which of them are leftovers of a dead writer."""
    with Checkpoints(place, every_steps=1) as checkpoints:
        checkpoints.begin_write(at(1))
    old = checkpoints.newest()
    assert isinstance(old, BucketPath)
    (old / METADATA).write_bytes(b"damaged")
    (old / f"{'0' * 16}.begun").write_bytes(b"")
    files = sorted(old.names())
    with Checkpoints(place, every_steps=1) as checkpoints:
        checkpoints.begin_write(at(2))
    assert sorted(complete(located(place))) == [1, 2]
    assert sorted(old.names()) == files


def test_a_checkpoint_that_cannot_be_deleted_fails_nothing_and_keeps_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of a dead writer in it stay as well."""
    place = f"memory://bucket/{secrets.token_hex(4)}"
    with Checkpoints(place, every_steps=1, keep=4) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.begin_write(at(step))
    old = located(f"{place}/step-00000001")
    assert isinstance(old, BucketPath)
    (old / f"{'0' * 16}.begun").write_bytes(b"")
    files = sorted(old.names())
    remove = MemoryFileSystem.rm_file

    def refusing(own: MemoryFileSystem, key: str) -> None:
        if key.startswith(old.key):
            raise PermissionError("access denied")
        remove(own, key)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm_file", refusing)
        with Checkpoints(place, every_steps=1, keep=1) as checkpoints:
            checkpoints.begin_write(at(4))
    assert sorted(complete(located(place))) == [1, 4]
    assert sorted(old.names()) == files


@pytest.mark.parametrize("name", ["run[1]", "run*"])
def test_a_name_that_looks_like_a_pattern_deletes_no_checkpoint_of_another_run(
    place: str, name: str
) -> None:
    """Regression: fsspec took `run[1]` for a pattern, and deleted the files of `run1`."""
    for run in ("run1", name):
        with Checkpoints(f"{place}/{run}", every_steps=1, keep=1 if run == name else 2) as own:
            for step in (1, 2):
                own.begin_write(at(step))
    assert sorted(complete(located(f"{place}/run1"))) == [1, 2]
    assert sorted(complete(located(f"{place}/{name}"))) == [2]


def test_files_that_s3_refuses_to_delete_are_noticed(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: s3fs drops the refusals in the answer to a request that deletes several files."""
    answer = s3fs.S3FileSystem._call_s3

    async def refusing(own: Any, method: str, *given: Any, **options: Any) -> Any:
        if method == "delete_object":
            refusal = {"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}
            raise ClientError(refusal, "DeleteObject")
        if method == "delete_objects":
            keys = [each["Key"] for each in options["Delete"]["Objects"]]
            return {"Errors": [{"Key": key, "Code": "AccessDenied"} for key in keys]}
        return await answer(own, method, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(s3fs.S3FileSystem, "_call_s3", refusing)
        with pytest.raises(InvalidSpec, match="cannot be kept at"):
            Checkpoints(f"{s3}/{secrets.token_hex(4)}", every_steps=1).probe()


def test_other_files_at_a_checkpoints_path_are_left_alone(place: str) -> None:
    (located(f"{place}/step-00000001") / "notes.txt").write_bytes(b"mine")
    checkpoints = Checkpoints(place, every_steps=1)
    checkpoints.begin_write(at(1))
    with pytest.raises(InvalidSpec, match=r"is not a checkpoint; saw notes\.txt"):
        checkpoints.finish_write()
    assert paths_in(place) == ["step-00000001/notes.txt"]


class Dead(BaseException):
    """Raised in place of the process' death."""


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(("keep", "new"), [(1, 2), (2, 1)], ids=["the next one", "the same step"])
def test_a_writer_that_dies_at_any_call_leaves_a_whole_checkpoint(
    monkeypatch: pytest.MonkeyPatch, keep: int, new: int
) -> None:
    """The whole checkpoint is the old or the new one; the next writer removes the rest of the
    other."""
    calls_to_live = 0
    kinds = []
    while "lived" not in kinds:
        place = f"memory://dead/{secrets.token_hex(4)}"
        with Checkpoints(place, every_steps=1, keep=keep) as checkpoints:
            checkpoints.begin_write(at(1))
        with monkeypatch.context() as patch:
            mortal(patch, calls_to_live)
            writer = Checkpoints(place, every_steps=1, keep=keep)
            writer.begin_write(at(new, 3))
            try:
                writer.finish_write()
                kinds.append("lived")
            except Dead:
                kinds.append("died")
        newest = Checkpoints(place, every_steps=1).newest()
        assert newest is not None
        found = read(newest, whole_chunk)
        whole = [each for each in (at(1), at(new, 3)) if not differences(found, with_aliases(each))]
        assert len(whole) == 1, f"after {calls_to_live} calls"
        with Checkpoints(place, every_steps=1, keep=1) as checkpoints:
            checkpoints.begin_write(at(5))
        assert len(paths_in(place)) == 2, f"after {calls_to_live} calls: {paths_in(place)}"
        calls_to_live += 1
    assert kinds.count("died") >= 4


@pytest.mark.long
@pytest.mark.parametrize("new", [1, 2], ids=["the same step", "the next one"])
def test_a_writer_that_is_halted_at_any_call_publishes_no_checkpoint_without_its_files(
    monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    """A process that has taken over removes the halted writer's draft, and writes a checkpoint."""
    calls_before, was_halted, failed = 0, True, 0
    while was_halted:
        place = f"memory://halted/{secrets.token_hex(4)}"
        with monkeypatch.context() as patch:
            halts = halted(
                patch, calls_before, partial(write, located(f"{place}/step-{new:08d}"), at(new, 3))
            )
            try:
                write(located(f"{place}/step-00000001"), at(1))
            except CheckpointFailed:
                failed += 1
        was_halted = bool(halts)
        for path in complete(located(place)).values():
            read(path, whole_chunk)
        calls_before += 1
    assert failed >= 3


def halted(
    patch: pytest.MonkeyPatch, calls_before: int, meanwhile: Callable[[], object]
) -> list[str]:
    """Halt the process before one of its calls to the storage while `meanwhile` runs; return the
    name of the call, once it was made."""
    left, halts = [calls_before], []

    def halting(act: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                halts.append(act.__name__)
                meanwhile()
            return act(*arguments, **options)

        return call

    for name in ("pipe_file", "cp_file", "rm_file", "find"):
        patch.setattr(MemoryFileSystem, name, halting(getattr(MemoryFileSystem, name)))
    return halts


def mortal(patch: pytest.MonkeyPatch, calls_to_live: int) -> None:
    """Simulate the death of the process before one of its calls that change the storage."""
    left = [calls_to_live]

    def dying(act: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Dead
            return act(*arguments, **options)

        return call

    for name in ("pipe_file", "rm_file"):
        patch.setattr(MemoryFileSystem, name, dying(getattr(MemoryFileSystem, name)))
    opened = MemoryFileSystem._open
    closing = dying(opened)

    def reading_or_not(files: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        return (opened if mode == "rb" else closing)(files, path, mode, **options)

    patch.setattr(MemoryFileSystem, "_open", reading_or_not)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "s3:/bucket/runs",
            "not a location for checkpoints; saw 's3:/bucket/runs'; expected a directory",
        ),
        ("s3://", "not a location"),
        ("s3://bucket//runs", "not a location"),
        ("s3://bucket/../runs", "not a location"),
        ("s3://bucket/runs?version=1", "not a location"),
        ("http://host/runs", "not a location"),
        ("simplecache::s3://bucket/runs", "not a location"),
        ("file://runs", "not a location"),
        ("gs://bucket/runs", "no installed filesystem reaches.*gcsfs"),
    ],
)
def test_an_invalid_url_is_refused_at_once(url: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        Checkpoints(url, every_steps=1)


def test_a_file_url_is_a_directory(tmp_path: Any) -> None:
    assert Checkpoints(f"file://{tmp_path}/runs", every_steps=1).directory == tmp_path / "runs"


def test_a_checkpoint_fails_if_its_storage_is_unavailable(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is handled like a full disk: training goes on, and the next checkpoint is tried."""
    place = f"{s3}/{secrets.token_hex(4)}"
    checkpoints = Checkpoints(place, every_steps=1)

    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(located(place).files, "pipe_file", away)
        checkpoints.begin_write(at(1))
        with pytest.raises(CheckpointFailed, match="RuntimeError: the connection broke"):
            checkpoints.finish_write()
    checkpoints.begin_write(at(2))
    checkpoints.finish_write()
    assert list(complete(located(place))) == [2]


def test_a_storage_that_is_overloaded_while_it_is_checked_is_no_refusal(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: InvalidSpec, after which the launcher does not start the worker again."""
    place = f"{s3}/{secrets.token_hex(4)}"

    def overloaded(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "SlowDown")

    monkeypatch.setattr(located(place).files, "pipe_file", overloaded)
    checkpoints = GenerationCheckpoints(ScriptPosition())
    with pytest.raises(Unavailable, match="SlowDown"):
        checkpoints.set_store(Checkpoints(place, every_steps=1))


@pytest.mark.long
def test_an_index_that_the_storage_writes_late_damages_no_checkpoint(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives up on the request that publishes an index, and the storage carries it out
    after a later checkpoint of the same step is complete."""
    place = f"{s3}/{secrets.token_hex(4)}"
    files = located(place).files
    late: list[Callable[[], None]] = []

    def delayed(done: Any) -> Any:
        def request(*args: Any, **options: Any) -> None:
            if not any(str(each).endswith(".metadata") for each in args):
                done(*args, **options)
                return
            late.append(lambda: done(*args, **options))
            raise TimeoutError("no answer")

        return request

    checkpoints = Checkpoints(place, every_steps=1)
    with monkeypatch.context() as patch:
        for name in ("pipe_file", "cp_file"):
            patch.setattr(files, name, delayed(getattr(files, name)))
        checkpoints.begin_write(at(1, 3))
        with pytest.raises(CheckpointFailed, match="no answer"):
            checkpoints.finish_write()
    assert len(late) == 1

    def arrive() -> None:
        with suppress(OSError):
            late[0]()

    arrive()
    assert (complete(located(place)), paths_in(place)) == ({}, [])
    checkpoints.begin_write(at(1, 2))
    checkpoints.finish_write()
    arrive()
    newest = checkpoints.newest()
    assert newest is not None
    assert differences(read(newest, whole_chunk), with_aliases(at(1, 2))) == []


@pytest.mark.long
def test_a_checkpoint_whose_last_answer_is_lost_is_whole(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage publishes the index, and the client gets an error: the files stay."""
    place = f"{s3}/{secrets.token_hex(4)}"
    files = located(place).files

    def unanswered(done: Any) -> Any:
        def request(*args: Any, **options: Any) -> None:
            done(*args, **options)
            if any(str(each).endswith(".metadata") for each in args):
                raise TimeoutError("no answer")

        return request

    checkpoints = Checkpoints(place, every_steps=1)
    with monkeypatch.context() as patch:
        for name in ("pipe_file", "cp_file"):
            patch.setattr(files, name, unanswered(getattr(files, name)))
        checkpoints.begin_write(at(1))
        with pytest.raises(CheckpointFailed, match="no answer"):
            checkpoints.finish_write()
    newest = checkpoints.newest()
    assert newest is not None
    assert differences(read(newest, whole_chunk), with_aliases(at(1))) == []
    checkpoints.begin_write(at(2))
    checkpoints.finish_write()
    assert len(paths_in(place)) == 2 * 2, "a file and an index of each, and no leftovers"


def steps_taken(cluster: LocalCluster, place: str, *, num_steps: int = 1000) -> list[int]:
    """Train as the only member of a new job; return the steps taken, at most `num_steps`."""
    model, optimizer = build("sgd", "layers")
    taken = []
    with lone(cluster) as session:
        model, optimizer = session.distribute(
            model, optimizer, checkpoints=shoal.Checkpoints(place, every_steps=4)
        )
        for batch in session.batches(data(), global_batch_size=24, epochs=2):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            taken.append(batch.step)
            if len(taken) == num_steps:
                break
    return taken


@pytest.mark.long
@pytest.mark.sampled()
def test_a_job_continues_from_its_newest_checkpoint_in_a_bucket(
    cluster: LocalCluster, place: str
) -> None:
    assert steps_taken(cluster, place, num_steps=6) == list(range(6))
    assert steps_taken(cluster, place) == list(range(4, 10))
    assert sorted(complete(located(place))) == [4, 8]


def test_a_bucket_that_does_not_exist_is_refused_before_training(
    cluster: LocalCluster, s3: str
) -> None:
    with pytest.raises(
        InvalidSpec, match=r"cannot be kept at s3://nowhere/runs.*the bucket exists"
    ):
        steps_taken(cluster, f"{s3.replace('shoal-test', 'nowhere')}/runs")


@pytest.mark.parametrize("file", [".distcp", ".metadata"])
def test_an_error_of_the_storage_during_a_read_is_an_os_error(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Each kind of bucket has its own errors, which callers of `read` do not know."""

    class Refused(Exception):
        pass

    def refuse(*_: object) -> bytes:
        raise Refused("the token has expired")

    path = located(f"memory://bucket/{secrets.token_hex(4)}")
    write(path, at(1))
    opened = MemoryFileSystem.open

    def open_file(files: MemoryFileSystem, key: str, *args: Any, **options: Any) -> Any:
        found = opened(files, key, *args, **options)
        if key.endswith(file):
            monkeypatch.setattr(found, "read", refuse)
        return found

    monkeypatch.setattr(MemoryFileSystem, "open", open_file)
    with pytest.raises(OSError, match="Refused: the token has expired"):
        read(path, whole_chunk)
