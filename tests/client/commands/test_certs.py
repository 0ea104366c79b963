"""`shoal certs` writes files that only their owner can read, and overwrites only to renew."""

import io
import os
import resource
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shoal_client.certificates.authority import (
    Authority,
    CertificateHolder,
    IssuedCertificate,
    holder_of,
    read,
)
from shoal_client.certificates.folder import CertificateFolder
from shoal_client.cli import parse
from shoal_client.local.access import LocalAccess
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsFiles, TlsIdentity, TlsMaterial
from shoal_proto.tls.identity import from_environment, in_folder
from shoal_proto.tls.names import COORDINATOR_NAME, Caller, CertificateRole, caller_among


def certs(folder: Path, *arguments: str) -> int:
    return parse(["certs", *arguments, "--dir", str(folder)])()


def test_init_makes_an_authority_and_a_certificate_for_each_role(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert certs(folder, "init", "--host", "shoal.example", "--host", "10.0.0.7") == 0
    names = {"ca", *(role.value for role in CertificateRole)}
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("crt", "key")
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for role in CertificateRole:
        holder = holder_of(read((folder / f"{role.value}.crt").read_bytes()))
        assert holder is not None and holder.caller == Caller(role, role.value)
        # Certificates are short-lived by default.
        assert holder.valid == timedelta(hours=24)
        TlsIdentity(in_folder(folder, role))
    coordinator = holder_of(read((folder / "coordinator.crt").read_bytes()))
    assert coordinator is not None and list(coordinator.hosts) == ["shoal.example", "10.0.0.7"]


def test_existing_certificates_are_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs(folder, "init")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidSpec, match="an authority already"):
        certs(folder, "init")
    with pytest.raises(InvalidSpec, match="of this name already"):
        certs(folder, "issue", "worker")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_name_that_is_issued_twice_at_once_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process issues the name after this one has seen that it is free."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    holder = CertificateHolder(caller=Caller(CertificateRole.WORKER, "w"), valid=timedelta(hours=1))
    issue = Authority.issue

    def issue_late(authority: Authority, holder: CertificateHolder) -> IssuedCertificate:
        monkeypatch.setattr(Authority, "issue", issue)
        folder.issue(holder)
        return authority.issue(holder)

    monkeypatch.setattr(Authority, "issue", issue_late)
    with pytest.raises(InvalidSpec, match="File exists"):
        folder.issue(holder)
    cert = folder.path / "w.crt"
    files = TlsFiles(ca=folder.path / "ca.crt", cert=cert, key=cert.with_suffix(".key"))
    TlsIdentity(files)


def test_an_init_that_is_refused_can_be_repeated(tmp_path: Path) -> None:
    """A refused init leaves no authority without certificates."""
    folder = tmp_path / "certs"
    with pytest.raises(InvalidSpec, match=r"saw 'schräg\.example'.*xn--"):
        certs(folder, "init", "--host", "schräg.example")
    assert list(folder.iterdir()) == []
    certs(folder, "init", "--valid-h", "87600")
    assert (folder / "coordinator.crt").exists()


@pytest.mark.parametrize(
    ("kept", "emptied"),
    [
        ((), "ca.key"),
        (("ca.key",), "ca.crt"),
        (("ca.key", "ca.crt"), "coordinator.key"),
        (("ca.key", "ca.crt", "coordinator.key", "server.crt", "server.key"), "coordinator.crt"),
    ],
)
@pytest.mark.parametrize("command", ["certs", "up"])
def test_an_init_that_was_cut_off_is_completed(
    tmp_path: Path, kept: tuple[str, ...], emptied: str, command: str
) -> None:
    """It was killed, or the machine lost power: files are missing, and one is empty."""
    folder = tmp_path / "certs"
    certs(folder, "init")
    for path in folder.iterdir():
        if path.name == emptied:
            path.write_bytes(b"")
        elif path.name not in kept:
            path.unlink()
    if command == "certs":
        assert certs(folder, "init", "--if-absent", "--host", "node-1") == 0
    else:
        access = LocalAccess({}, made=folder)
        access.make()
        access.close()
    for role in CertificateRole:
        TlsIdentity(in_folder(folder, role))
        issued = read((folder / f"{role.value}.crt").read_bytes())
        issued.verify_directly_issued_by(read((folder / "ca.crt").read_bytes()))
    if command == "certs":
        holder = holder_of(read((folder / "coordinator.crt").read_bytes()))
        assert holder is not None and holder.hosts == ["node-1"]


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    certs(tmp_path / "certs", "init")
    (tmp_path / "certs" / "other.crt").write_bytes(b"")
    with pytest.raises(InvalidSpec, match=r"cannot be read; saw .*other\.crt: "):
        certs(tmp_path / "certs", "renew")


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    folder.mkdir(mode=0o755)
    with pytest.raises(InvalidSpec, match=r"mode 755.*chmod 700"):
        certs(folder, "init")
    assert list(folder.iterdir()) == []


def test_a_worker_may_be_bound_to_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs(folder, "init")
    certs(folder, "issue", "worker", "--name", "w-1", "--job", "digits", "--valid-h", "1")
    holder = holder_of(read((folder / "w-1.crt").read_bytes()))
    assert holder is not None
    assert holder.caller == Caller(CertificateRole.WORKER, "w-1", "digits")
    assert holder.valid == timedelta(hours=1)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("issue",), "only issue takes a role"),
        (("init", "worker"), "only issue takes a role"),
        (("issue", "root"), "no such role"),
        (("issue", "viewer", "--job", "j"), "only a worker"),
        (("issue", "viewer", "--name", "a/b"), "bad --name"),
        (("issue", "viewer", "--valid-h", "0"), "bad --valid-h"),
        (("issue", "viewer", "--valid-h", "nan"), "bad --valid-h"),
        (("init", "--host", ""), "bad --host"),
        (("init", "--host", "a b"), "bad --host"),
        (("renew", "--every-h", "-1"), "bad --every-h"),
        (("renew", "--every-h", "inf"), "bad --every-h"),
        (("renew", "--host", "page"), "--host is only for issue and init"),
        (("renew", "--valid-h", "720"), "--valid-h is only for issue and init"),
        (("init", "--name", "w"), "--name is only for issue"),
        (("show", "--if-absent"), "--if-absent is only for init"),
        (("init", "--every-h", "8"), "--every-h is only for renew"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        certs(tmp_path, *arguments)


def test_renewed_certificates_are_for_the_same_holders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certs"
    certs(folder, "init", "--valid-h", "2")
    certs(folder, "issue", "worker", "--name", "w", "--job", "j")
    before = {each.path: each for each in CertificateFolder(folder).list_certificates()}
    bytes_before = {path: path.read_bytes() for path in before}
    assert certs(folder, "init", "--if-absent") == 0
    assert certs(folder, "renew") == 0
    after = {each.path: each for each in CertificateFolder(folder).list_certificates()}
    assert {p: (e.caller, e.hosts) for p, e in after.items()} == {
        p: (e.caller, e.hosts) for p, e in before.items()
    }
    for path, old in bytes_before.items():
        assert path.read_bytes() != old and path.stat().st_mode & 0o777 == 0o600
        new = read(path.read_bytes())
        assert new.public_key() != read(old).public_key()
        hours = 24 if path.name == "w.crt" else 2
        lasts = new.not_valid_after_utc - datetime.now(UTC)
        assert timedelta(hours=hours) - lasts < timedelta(minutes=5)
    assert not list(folder.glob("*.part"))
    capsys.readouterr()
    assert certs(folder, "show") == 0
    shown = capsys.readouterr().out
    assert "w.crt: worker w of job j; until" in shown and "operator.crt" in shown


def test_a_repeated_init_names_the_hosts_that_are_given(tmp_path: Path) -> None:
    """A requeued job has another first node. Without options certificates stay as they are, and so
    do those of `issue`."""
    folder = tmp_path / "certs"
    certs(folder, "init", "--host", "node-1")
    certs(folder, "issue", "coordinator", "--name", "page", "--host", "page.example")

    def reissued(*options: str) -> dict[str, tuple[list[str], timedelta]]:
        assert certs(folder, "init", "--if-absent", *options) == 0
        found = (holder_of(read((folder / f"{n}.crt").read_bytes())) for n in names)
        return {each.caller.name: ([*each.hosts], each.valid) for each in found if each is not None}

    names = ("coordinator", "page", "worker")
    day = timedelta(hours=24)
    others = {"page": (["page.example"], day), "worker": ([], day)}
    assert reissued("--host", "node-2") == {"coordinator": (["node-2"], day), **others}
    assert reissued() == {"coordinator": (["node-2"], day), **others}
    two = timedelta(hours=2)
    assert reissued("--valid-h", "2") == {
        "coordinator": (["node-2"], two),
        "page": others["page"],
        "worker": ([], two),
    }


def test_a_pair_that_cannot_be_written_stays_as_it_is(tmp_path: Path) -> None:
    """The disk has space for a key, and not for a certificate, which is longer."""
    folder = tmp_path / "certs"
    certs(folder, "init")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    lengths = [len(before[folder / f"worker.{kind}"]) for kind in ("key", "crt")]
    with largest_file(sum(lengths) // 2), pytest.raises(InvalidSpec, match="cannot be written"):
        certs(folder, "renew")
    with largest_file(sum(lengths) // 2), pytest.raises(InvalidSpec, match="cannot be written"):
        certs(folder, "issue", "worker", "--name", "w")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert certs(folder, "issue", "worker", "--name", "w") == 0


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Have writes behind this length of a file fail within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_repeated_renewal_goes_on_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first renewal must succeed. A later one that fails is tried again, and the error is
    printed."""
    folder = tmp_path / "certs"
    certs(folder, "init", "--valid-h", "2")
    key, away = folder / "ca.key", tmp_path / "away"
    certificates: list[bytes] = []

    class Stopped(Exception):
        pass

    def sleep(time_s: float) -> None:
        certificates.append((folder / "worker.crt").read_bytes())
        if len(certificates) == 1:
            key.rename(away)
        elif len(certificates) == 2:
            away.rename(key)
        elif len(certificates) == 3:
            raise Stopped

    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(Stopped):
        certs(folder, "renew", "--every-h", "1e-9")
    assert certificates[0] == certificates[1] != certificates[2]
    assert capsys.readouterr().err.count("could not be renewed") == 1
    key.unlink()
    with pytest.raises(InvalidSpec, match="cannot be read"):
        certs(folder, "renew", "--every-h", "1e-9")


def test_a_renewal_whose_message_cannot_be_printed_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed renewal would issue all certificates again each minute."""
    folder = tmp_path / "certs"
    certs(folder, "init")
    certificates: set[bytes] = set()

    class Stopped(Exception):
        pass

    def sleep(time_s: float) -> None:
        certificates.add((folder / "worker.crt").read_bytes())
        if len(certificates) == 3:
            raise Stopped

    monkeypatch.setattr("time.sleep", sleep)
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        io.TextIOWrapper(full, write_through=True) as stdout,
    ):
        monkeypatch.setattr("sys.stdout", stdout)
        with pytest.raises(Stopped):
            certs(folder, "renew", "--every-h", "1e-9")
    assert capsys.readouterr().err == ""


def test_a_process_that_starts_during_a_renewal_reads_the_pair_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    files = in_folder(folder.path, CertificateRole.SERVER)
    earlier = files.cert.read_bytes()
    folder.renew()
    renewed = files.cert.read_bytes()
    files.cert.write_bytes(earlier)  # the key is replaced first
    monkeypatch.setattr("time.sleep", lambda time_s: files.cert.write_bytes(renewed))
    assert TlsIdentity(files).material.cert == renewed


def test_renewed_files_are_used_once_they_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_WITHIN_S", 60.0)
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    files = in_folder(folder.path, CertificateRole.SERVER)
    own = TlsIdentity(files)
    first = own.material
    assert own.material is first
    key = files.key.read_bytes()
    folder.renew()
    whole = files.key.read_bytes()
    files.key.write_bytes(key)
    assert own.material is first, "a certificate without its key"
    files.key.write_bytes(whole)
    renewed = own.material
    assert renewed is not first and renewed.cert == files.cert.read_bytes()
    files.cert.unlink()
    assert own.material is renewed


def test_a_worker_sees_the_renewal_of_a_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces a link, and removes the folder that it named. The worker has its paths
    from the launcher."""
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_WITHIN_S", 60.0)
    folder, mount = CertificateFolder(tmp_path / "certs"), tmp_path / "own"
    folder.init()
    mount.mkdir()

    def update(version: str) -> None:
        shutil.copytree(folder.path, mount / version)
        (mount / "..new").symlink_to(version)
        (mount / "..new").replace(mount / "..data")

    update("..1")
    for path in folder.path.iterdir():
        (mount / path.name).symlink_to(f"..data/{path.name}")
    of_worker = from_environment(in_folder(mount, CertificateRole.WORKER).environment())
    assert of_worker is not None
    worker = TlsIdentity(of_worker)
    folder.renew()
    update("..2")
    shutil.rmtree(mount / "..1")
    assert worker.material.cert == (folder.path / "worker.crt").read_bytes()


@pytest.mark.parametrize("call", ["stat", "read_bytes"])
def test_a_disk_that_does_not_answer_delays_only_the_use_of_a_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Heartbeats use the certificate, too: a file server that is restarted must cost no member. A
    child that is forked meanwhile looks by itself."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    own = TlsIdentity(in_folder(folder.path, CertificateRole.WORKER))
    first = own.material
    folder.renew()
    plain, answers = getattr(Path, call), threading.Event()

    def hang(path: Path) -> object:
        assert answers.wait(60.0)
        return plain(path)

    monkeypatch.setattr(Path, call, hang)
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_EVERY_S", 0.0)
    with ThreadPoolExecutor(1) as calls:
        found = calls.submit(lambda: [own.material for _ in range(100)])
        try:
            assert set(found.result(10.0)) == {first}
            child = os.fork()
            if not child:
                answers.set()
                os._exit(0 if awaits_renewal(own, first) else 1)
            assert os.waitpid(child, 0)[1] == 0
        finally:
            answers.set()
    assert awaits_renewal(own, first)


def awaits_renewal(own: TlsIdentity, first: TlsMaterial) -> bool:
    """True once the material is another one; False after 10 s."""
    give_up_s = time.monotonic() + 10.0
    while own.material is first and time.monotonic() < give_up_s:
        pass
    return own.material is not first


def test_an_authority_removed_from_the_files_is_no_longer_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running process refuses a server with a certificate of the old authority."""
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_WITHIN_S", 60.0)
    servers = []
    for name in ("old", "new"):
        folder = CertificateFolder(tmp_path / name)
        folder.init()
        # The context of the page for browsers accepts any client, so that only the client decides.
        servers.append(
            TlsIdentity(in_folder(folder.path, CertificateRole.COORDINATOR)).material.open
        )
    place = tmp_path / "old"
    own = TlsIdentity(in_folder(place, CertificateRole.WORKER))

    def accepts(server: ssl.SSLContext) -> bool:
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        calling = own.material.client.wrap_bio(into, out, server_hostname=COORDINATOR_NAME)
        return _meet(calling, server.wrap_bio(out, into, server_side=True))

    assert [accepts(each) for each in servers] == [True, False]
    for path in (tmp_path / "new").iterdir():
        path.replace(place / path.name)
    assert [accepts(each) for each in servers] == [False, True]


def test_an_incomplete_configuration_is_refused(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    assert from_environment({}) is None
    found = from_environment({"SHOAL_TLS": str(folder.path)})
    assert found == in_folder(folder.path, CertificateRole.WORKER)
    assert found is not None and from_environment(found.environment()) == found
    with pytest.raises(InvalidSpec, match="only some of the three files"):
        from_environment({"SHOAL_TLS_CA": str(folder.path / "ca.crt")})
    with pytest.raises(
        InvalidSpec, match=r"no certificate for the role worker.*certs issue worker"
    ):
        from_environment({"SHOAL_TLS": str(tmp_path)})
    with identity.using(None), pytest.raises(InvalidSpec, match="no certificate with its key"):
        wrong = in_folder(folder.path, CertificateRole.VIEWER)
        identity.use(type(wrong)(ca=wrong.ca, cert=wrong.cert, key=folder.path / "worker.key"))


@pytest.mark.parametrize(
    ("names", "caller"),
    [
        ([b"spiffe://shoal/worker/a"], Caller(CertificateRole.WORKER, "a")),
        ([b"x", b"spiffe://shoal/worker/a/job/j"], Caller(CertificateRole.WORKER, "a", "j")),
        ([b"spiffe://shoal/root/a"], None),
        ([b"spiffe://shoal/worker"], None),
        ([b"spiffe://shoal/worker/a/job/"], None),
        ([b"spiffe://shoal/worker/a/b/c"], None),
        ([b"spiffe://other/worker/a"], None),
        ([b"spiffe://shoal/worker/a", b"spiffe://shoal/operator/a"], None),
        ([b"spiffe://shoal/w\xff/a"], None),
        ([], None),
    ],
)
def test_a_caller_is_read_from_exactly_one_uri(names: list[bytes], caller: Caller | None) -> None:
    assert caller_among(names) == caller


def test_only_a_coordinators_certificate_has_its_server_name(tmp_path: Path) -> None:
    """A client refuses that of a worker or of a server at the coordinator's address."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    for role, is_taken in (
        (CertificateRole.COORDINATOR, True),
        (CertificateRole.WORKER, False),
        (CertificateRole.SERVER, False),
    ):
        server = TlsIdentity(in_folder(folder.path, role)).material.server
        client = TlsIdentity(in_folder(folder.path, CertificateRole.OPERATOR)).material.client
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        calling = client.wrap_bio(into, out, server_hostname=COORDINATOR_NAME)
        answering = server.wrap_bio(out, into, server_side=True)
        assert _meet(calling, answering) is is_taken


def _meet(calling: ssl.SSLObject, answering: ssl.SSLObject) -> bool:
    """True if the handshake succeeds."""
    for _ in range(4):
        for side in (calling, answering):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True
