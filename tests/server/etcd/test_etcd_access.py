"""Access to etcd: TLS, user and password, and the errors when it fails."""

import asyncio
import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from support.clusters.etcd_fixture import ask_etcd, etcd_processes, running_etcd

from shoal_client.local.etcd import EtcdOptions, RunningEtcd, start_members
from shoal_client.local.process import Supervisor
from shoal_proto.errors import AccessDenied, InvalidSpec, RefusedError, Unavailable
from shoal_server.etcd.api import Put, Revision, absent
from shoal_server.etcd.keys import ROOT
from shoal_server.etcd.remote.client import EtcdClient, opened
from shoal_server.etcd.remote.config import EtcdConfig, parse_endpoints
from shoal_server.etcd.remote.failures import unreachable

# --- TLS ---


@dataclass(frozen=True)
class Secured:
    """An etcd with TLS that requires a client certificate, and the files to reach it."""

    endpoint: str
    config: EtcdConfig
    other_ca_file: Path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = trustme.CA(), trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    client = authority.issue_cert("shoal@example.org")
    files = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key", "own", "own-key")}
    authority.cert_pem.write_to_path(files["ca"])
    server.cert_chain_pems[0].write_to_path(files["cert"])
    server.private_key_pem.write_to_path(files["key"])
    client.cert_chain_pems[0].write_to_path(files["own"])
    client.private_key_pem.write_to_path(files["own-key"])
    stranger.cert_pem.write_to_path(folder / "other.pem")
    options = EtcdOptions(
        fsync=False,
        credentials=grpc.ssl_channel_credentials(
            files["ca"].read_bytes(), files["own-key"].read_bytes(), files["own"].read_bytes()
        ),
        arguments=(
            *("--cert-file", str(files["cert"]), "--key-file", str(files["key"])),
            *("--client-cert-auth", "--trusted-ca-file", str(files["ca"])),
        ),
    )
    with running_etcd(folder, options) as endpoint:
        config = EtcdConfig(
            endpoints=(endpoint,),
            ca_file=files["ca"],
            cert_file=files["own"],
            key_file=files["own-key"],
            timeout_s=2,
            attempt_timeout_s=1,
        )
        yield Secured(endpoint, config, folder / "other.pem")


async def test_calls_and_watches_work_over_mutual_tls(secured: Secured) -> None:
    """The client has the authority's file and a certificate."""
    async with EtcdClient(secured.config) as client:
        revision = await client.put("/shoal/a", b"1")
        async with aclosing(client.watch("/shoal/", revision)) as watch:
            assert (await anext(watch)).revision == revision


async def test_the_error_of_plain_text_to_an_etcd_with_tls_names_the_option(
    secured: Secured,
) -> None:
    """The error advises --etcd-ca."""
    plain = EtcdConfig(endpoints=(secured.endpoint,), timeout_s=1, attempt_timeout_s=1)
    async with EtcdClient(plain) as client:
        with pytest.raises(Unavailable, match="--etcd-ca"):
            await client.get("/shoal/a")


async def test_an_etcd_signed_by_another_authority_is_refused(secured: Secured) -> None:
    """The error reports a failed TLS handshake."""
    wary = replace(secured.config, ca_file=secured.other_ca_file)
    async with EtcdClient(wary) as client:
        with pytest.raises(Unavailable, match="TLS handshake failed"):
            await client.get("/shoal/a")


def test_an_etcd_that_was_killed_does_not_look_like_a_fault_of_tls() -> None:
    """gRPC's text for a connection that ends before its handshake has no fault of TLS."""
    seen = {"etcd:2379": "UNAVAILABLE: failed to connect; last error: tcp handshaker shutdown"}
    error = unreachable(seen, tls=True, timeout_s=1.0)
    assert error.fix == "Check the address and that etcd runs there."


async def test_a_client_without_a_certificate_is_refused(secured: Secured) -> None:
    """The call fails as Unavailable."""
    anonymous = replace(secured.config, cert_file=None, key_file=None)
    async with EtcdClient(anonymous) as client:
        with pytest.raises(Unavailable, match="no etcd answered"):
            await client.get("/shoal/a")


async def test_tls_to_an_etcd_without_it_fails(secured: Secured, etcd_endpoint: str) -> None:
    """The error mentions TLS."""
    async with EtcdClient(replace(secured.config, endpoints=(etcd_endpoint,))) as client:
        with pytest.raises(Unavailable, match="check that etcd runs and serves TLS"):
            await client.get("/shoal/a")


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    """etcd is restarted with another authority, which did not sign the earlier certificate."""
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key", "own", "own-key")}

    def renew() -> None:
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("s@example.org")
        authority.cert_pem.write_to_path(files["ca"])
        server.cert_chain_pems[0].write_to_path(files["cert"])
        server.private_key_pem.write_to_path(files["key"])
        client.cert_chain_pems[0].write_to_path(files["own"])
        client.private_key_pem.write_to_path(files["own-key"])

    def options() -> EtcdOptions:
        return EtcdOptions(
            fsync=False,
            credentials=grpc.ssl_channel_credentials(
                files["ca"].read_bytes(), files["own-key"].read_bytes(), files["own"].read_bytes()
            ),
            arguments=(
                *("--cert-file", str(files["cert"]), "--key-file", str(files["key"])),
                *("--client-cert-auth", "--trusted-ca-file", str(files["ca"])),
            ),
        )

    renew()
    with etcd_processes(tmp_path, options()) as (supervisor, (etcd,)):
        config = EtcdConfig(
            endpoints=(etcd.endpoint,),
            ca_file=files["ca"],
            cert_file=files["own"],
            key_file=files["own-key"],
            timeout_s=10,
            attempt_timeout_s=1,
        )
        async with EtcdClient(config) as client:
            await client.put("/shoal/a", b"1")
            etcd.process.kill()
            etcd.process.wait()
            renew()
            start_members(supervisor.spawn, [replace(etcd.member, options=options())])
            await client.put("/shoal/a", b"2")
            # A missing file changes nothing for a client that has read it.
            files["own"].unlink()
            await client.put("/shoal/a", b"3")


# --- user and password ---


@pytest.fixture
def guarded(
    tmp_path: Path, request: pytest.FixtureRequest
) -> "Iterator[tuple[Supervisor, RunningEtcd]]":
    """Run an etcd in which the user `shoal`, with the password `secret`, may use the keys of Shoal
    (below the prefix in the parameter, if any) and nothing else."""
    root = getattr(request, "param", "") + ROOT
    with etcd_processes(tmp_path) as (supervisor, (etcd,)):
        for user, role in (("root", "root"), ("shoal", "shoal")):
            ask_etcd(etcd.endpoint, "auth/user/add", name=user, password="secret")
            ask_etcd(etcd.endpoint, "auth/role/add", name=role)
            ask_etcd(etcd.endpoint, "auth/user/grant", user=user, role=role)
        permission = {
            "permType": "READWRITE",
            "key": b64encode(root.encode()).decode(),
            "range_end": b64encode(root[:-1].encode() + b"0").decode(),
        }
        ask_etcd(etcd.endpoint, "auth/role/grant", name="shoal", perm=permission)
        ask_etcd(etcd.endpoint, "auth/enable")
        yield supervisor, etcd


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("secret\n")
    return path


def login(endpoint: str, password_file: Path) -> EtcdConfig:
    return EtcdConfig(endpoints=(endpoint,), user="shoal", password_file=password_file, silence_s=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("guarded", "prefix"), [("", ""), ("/team", "/team")], indirect=["guarded"]
)
async def test_a_user_may_do_what_its_role_allows(
    guarded: tuple[Supervisor, RunningEtcd], password_file: Path, prefix: str
) -> None:
    """The user can use the keys of its role and no others. Calls and watches continue after a
    restart of etcd, which loses the token."""
    supervisor, etcd = guarded
    async with opened(replace(login(etcd.endpoint, password_file), prefix=prefix)) as client:
        lease = await client.grant(30)
        revision = await client.put(ROOT + "a", b"1", lease)
        assert await client.keep_alive(lease) > 0
        async with aclosing(client.watch(ROOT, revision)) as watch:
            assert (await anext(watch)).revision == revision
            with pytest.raises(AccessDenied, match=f"permission denied.* under {prefix}{ROOT}"):
                await client.put("/other", b"1")
            with pytest.raises(AccessDenied, match="permission denied"):
                await anext(client.watch("/other", Revision(1)))
            etcd.process.kill()
            etcd.process.wait()
            start_members(supervisor.spawn, [etcd.member])
            made = await client.transact((absent(ROOT + "b"),), (Put(ROOT + "b", b""),))
            assert (await anext(watch)).revision == made.revision


async def test_a_wrong_or_no_password_is_refused(
    guarded: tuple[Supervisor, RunningEtcd], password_file: Path, tmp_path: Path
) -> None:
    """The error names the option of the password's file."""
    _, etcd = guarded
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    for config in (
        login(etcd.endpoint, wrong),
        replace(login(etcd.endpoint, password_file), user="nobody"),
        EtcdConfig(endpoints=(etcd.endpoint,)),
    ):
        async with EtcdClient(config) as client:
            with pytest.raises(AccessDenied, match="--etcd-password-file"):
                await client.get(ROOT + "a")
            with pytest.raises(AccessDenied):
                await client.transact((), (Put(ROOT + "a", b""),))
            with pytest.raises(AccessDenied):
                await anext(client.watch(ROOT, Revision(1)))


def change_password(endpoint: str, password: str) -> None:
    root = ask_etcd(endpoint, "auth/authenticate", name="root", password="secret")
    httpx.post(
        f"http://{endpoint}/v3/auth/user/changepw",
        json={"name": "shoal", "password": password},
        headers={"Authorization": root["token"]},
        trust_env=False,
    ).raise_for_status()


async def test_a_changed_password_is_read_from_the_file(
    guarded: tuple[Supervisor, RunningEtcd], password_file: Path
) -> None:
    """A change in etcd ends all logins. Until the file has the new one, calls are repeated."""
    _, etcd = guarded
    config = replace(login(etcd.endpoint, password_file), timeout_s=1, attempt_timeout_s=1)
    async with EtcdClient(config) as client:
        await client.put(ROOT + "a", b"1")
        change_password(etcd.endpoint, "other")
        with pytest.raises(Unavailable, match=r"authentication failed.*--etcd-password-file"):
            await client.put(ROOT + "a", b"2")
        await asyncio.to_thread(password_file.write_text, "other")
        await client.put(ROOT + "a", b"3")
        assert (await client.transact((), (Put(ROOT + "a", b"4"),))).succeeded


async def test_a_password_for_an_etcd_without_authentication_is_ignored(
    etcd_endpoint: str, password_file: Path
) -> None:
    """The call succeeds."""
    async with EtcdClient(login(etcd_endpoint, password_file)) as client:
        assert await client.put(ROOT + "a", b"") > 0


# --- an unavailable etcd, requests that it refuses, bad settings ---


async def test_the_error_names_every_endpoint_that_did_not_answer() -> None:
    """The error also has what was seen at an endpoint that refuses connections."""
    with socket.socket() as closed, socket.socket() as deaf:
        closed.bind(("127.0.0.1", 0))
        deaf.bind(("127.0.0.1", 0))
        # The kernel completes connections, but they are never accepted.
        deaf.listen(1)
        endpoints = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, deaf))
        config = EtcdConfig(endpoints=endpoints, timeout_s=1.5, attempt_timeout_s=0.5)
        async with EtcdClient(config) as client:
            for call in (client.get("/shoal/a"), client.transact((), (Put("/shoal/a", b""),))):
                with pytest.raises(Unavailable, match="no etcd answered") as caught:
                    await call
                for endpoint in endpoints:
                    assert endpoint in caught.value.seen
                assert "refused" in caught.value.seen


async def test_a_dead_endpoint_beside_a_live_one_delays_no_call(etcd_endpoint: str) -> None:
    """Calls succeed within their limit of 1 s."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        config = EtcdConfig(endpoints=(dead, etcd_endpoint), timeout_s=1, attempt_timeout_s=1)
        async with EtcdClient(config) as client:
            assert await client.put("/shoal/a", b"1") > 0
            assert (await client.transact((), (Put("/shoal/a", b""),))).succeeded


async def test_a_request_above_etcds_limits_is_refused(etcd_endpoint: str) -> None:
    """The value is too large, or there are too many operations; later calls succeed."""
    async with EtcdClient(EtcdConfig(endpoints=(etcd_endpoint,))) as client:
        with pytest.raises(RefusedError, match="too large"):
            await client.put("/shoal/large", bytes(3 << 20))
        with pytest.raises(RefusedError, match="too many operations"):
            await client.transact((), [Put(f"/shoal/{n}", b"") for n in range(129)])
        assert await client.get("/shoal/large") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": ()}, "no etcd endpoint"),
        ({"endpoints": ("http://127.0.0.1:2379",)}, "without a scheme"),
        ({"endpoints": ("127.0.0.1",)}, "host:port"),
        ({"endpoints": ("127.0.0.1:0",)}, "host:port"),
        ({"user": "a"}, "password is missing"),
        ({"cert_file": Path("a")}, "a client certificate needs its key"),
        ({"cert_file": Path("a"), "key_file": Path("b")}, "without TLS"),
        ({"timeout_s": 1, "attempt_timeout_s": 2}, "contradict"),
        ({"silence_s": 0}, "silence_s"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    """Bad settings are refused at construction."""
    with pytest.raises(InvalidSpec, match=message):
        EtcdConfig(**{"endpoints": ("127.0.0.1:2379",), **settings})  # type: ignore[arg-type]


async def test_the_error_names_a_missing_ca_file(tmp_path: Path) -> None:
    """The first call raises the error."""
    config = EtcdConfig(endpoints=("127.0.0.1:1",), ca_file=tmp_path / "none.pem")
    async with EtcdClient(config) as client:
        with pytest.raises(InvalidSpec, match=r"none\.pem"):
            await client.get("/shoal/a")


def test_endpoints_are_separated_by_commas() -> None:
    """Blanks around endpoints are ignored."""
    assert parse_endpoints(" a:1, [::1]:2,") == ("a:1", "[::1]:2")
    for bad in ("", ",", "a", "a:b", "https://a:1"):
        with pytest.raises(InvalidSpec):
            parse_endpoints(bad)


@pytest.mark.parametrize(
    "prefix", ["/shoal/v1", "/shoal/v1/jobs", "/team-a/shoal/v1", "/team-a/shoal/v1/members"]
)
def test_a_prefix_within_the_keys_of_a_cluster_is_refused(prefix: str) -> None:
    """Keys under such a prefix would lie among those of another cluster (without a prefix, or at
    /team-a), which would read them as jobs and members."""
    with pytest.raises(InvalidSpec, match="expected a prefix without /shoal/v1"):
        EtcdConfig(endpoints=("127.0.0.1:1",), prefix=prefix)


@pytest.mark.parametrize("prefix", ["/team-a", "/shoal", "/a/shoal/v12", "/a/b.c_d"])
def test_prefixes_outside_the_keys_of_a_cluster_are_accepted(prefix: str) -> None:
    EtcdConfig(endpoints=("127.0.0.1:1",), prefix=prefix)
