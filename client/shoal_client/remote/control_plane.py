"""`shoal up --hosts` and `shoal down`: a control plane on several hosts, which outlives the
command. An order to a host is one call of `on_host` over ssh. The certificates' authority, and a
record of the hosts, stay on this machine.
"""

import json
import platform
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.host.reports import check_reachable
from shoal_client.local.access import ETCD_CERTIFICATES, etcd_holders
from shoal_client.local.directory import locked
from shoal_client.local.etcd import EtcdAddresses
from shoal_client.remote.on_host import (
    LOOK,
    START,
    STOP,
    HostAnswer,
    HostOrder,
    HostPlan,
    HostPorts,
)
from shoal_client.remote.ssh import ADVICE, LOCALHOST, MARK, check_ssh, command_on
from shoal_proto.errors import InvalidSpec, Unavailable
from shoal_proto.terminal import printable
from shoal_proto.tls import identity
from shoal_proto.tls.identity import CA_FILE, in_folder
from shoal_proto.tls.names import CertificateRole

ANSWER_S = 90.0
"""A busy host may take long to start Python."""
STARTED_S = 300.0
LEADS_WITHIN_S = 60.0
VALID = timedelta(days=365)
"""The certificates are not renewed: the authority's key is on this machine."""
RECORD = "hosts.json"
CERTIFICATES = "certs"
LAST_LINES = 3

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class HostFailure:
    """Reason why a host did not carry out an order."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class ControlPlaneHosts:
    """Hosts of a control plane, as recorded on this machine."""

    names: Sequence[str]
    directory: str = ""
    """Directory on the hosts and on this machine; empty: the usual ones."""
    python: str = ""
    """Empty: the path of this Python."""
    machine: str = ""
    """Name of the machine that recorded them, which is `localhost` among the hosts."""

    @property
    def here(self) -> Path:
        """Directory of the certificates and of the record on this machine."""
        if self.directory:
            return Path(self.directory) / "here"
        return Path.home() / ".shoal" / "control-plane"

    @property
    def certificates(self) -> Path:
        """Certificates on this machine, with the authority's key."""
        return self.here / CERTIFICATES

    def ask(
        self, orders: Mapping[str, HostOrder], within_s: float
    ) -> dict[str, HostAnswer | HostFailure]:
        """Send each host its order, all at once; return the answers and failures by host. If a
        START fails, all hosts are stopped, and only that failure is returned: the other hosts could
        wait long for an etcd member that does not come up."""
        answers: dict[str, HostAnswer | HostFailure] = {}
        with ThreadPoolExecutor(max(1, len(orders))) as pool:
            asked = {
                pool.submit(self._ask, name, order, within_s): name
                for name, order in orders.items()
            }
            for each in as_completed(asked):
                name, answer = asked[each], each.result()
                answers[name] = answer
                if orders[name].action == START and isinstance(answer, HostFailure):
                    stops = {n: replace(o, action=STOP, files={}) for n, o in orders.items()}
                    self.ask(stops, ANSWER_S)
                    return {name: answer}
        return {name: answers[name] for name in orders}

    def order(self, name: str, action: str) -> HostOrder:
        """Return an order for this host."""
        return HostOrder(action=action, name=name, directory=self.directory)

    def _ask(self, name: str, order: HostOrder, within_s: float) -> HostAnswer | HostFailure:
        words = (self.python or sys.executable, "-P", "-u", "-m", "shoal_client.remote.on_host")
        try:
            ended = subprocess.run(
                command_on(name, words),
                input=json.dumps(asdict(order)) + "\n",
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return HostFailure(reason=f"no answer within {within_s:g} s")
        _, mark, text = ended.stdout.rpartition(MARK)
        if mark:
            with suppress(ValueError, TypeError):
                return HostAnswer(**json.loads(text))
        lines = ended.stdout.strip().splitlines()
        is_refusal = ended.returncode == 1
        shown = lines if is_refusal else lines[-LAST_LINES:]
        return HostFailure(reason=printable("\n".join(shown) or "no answer", lines=True))


@dataclass(frozen=True, kw_only=True)
class ControlPlaneConfig:
    """Parts of a control plane to start."""

    hosts: ControlPlaneHosts
    base_port: int = 0
    """First of four ports on each host; 0: any free ones."""
    num_parameter_servers: int = 0
    snapshot_roots: Sequence[str] = ()
    prefix: str = ""
    limits: Mapping[str, float]
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """A control plane that is up."""

    coordinators: Sequence[str]
    """host:port of each."""
    pages: Sequence[str]
    etcd: Sequence[str]
    directories: Mapping[str, str]
    """Directory of logs and etcd's data, by host."""
    certificates: Path


def check_number(names: Sequence[str]) -> None:
    """Raise InvalidSpec for a number of hosts other than 1, 3 or 5."""
    if len(names) not in (1, 3, 5):
        raise InvalidSpec(
            "bad number of hosts for a control plane",
            seen=f"{len(names)}: {', '.join(names)}",
            expected="1, 3 or 5 hosts",
            fix="etcd serves as long as more than half of its members run: four hosts survive the"
            " loss of one, as three do, and two hosts survive none.",
        )


def start(config: ControlPlaneConfig, say: Say) -> ControlPlane:
    """Start a control plane; return once a coordinator leads. Raises InvalidSpec if one is up or is
    being started from this machine, and Unavailable if a host cannot be used or a part does not
    come up: then nothing is left."""
    here = config.hosts.here
    check_ssh(config.hosts.names)
    here.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(here))
        except BlockingIOError as error:
            raise InvalidSpec(
                "another `shoal up --hosts` starts a control plane",
                seen=str(here),
                expected="one start at a time",
            ) from error
        return _start(config, say)


def _start(config: ControlPlaneConfig, say: Say) -> ControlPlane:
    hosts = config.hosts
    _check_record(hosts)
    looks = {
        name: replace(hosts.order(name, LOOK), base_port=config.base_port) for name in hosts.names
    }
    found = _usable(hosts.ask(looks, ANSWER_S))
    _check_free(found)
    addresses = _addresses(found)
    plans = _plans(config, addresses, {name: found[name].ports for name in hosts.names})
    _write_record(hosts)
    try:
        files = _make_certificates(hosts.certificates, list(addresses.values()))
        say(f"starting on {', '.join(hosts.names)}")
        orders = {
            name: replace(hosts.order(name, START), plan=asdict(plan), files=files)
            for name, plan in plans.items()
        }
        started = _usable(hosts.ask(orders, STARTED_S), "start")
        control_plane = ControlPlane(
            coordinators=[_at(plan.address, plan.ports["coordinator"]) for plan in plans.values()],
            pages=[f"https://{_at(p.address, p.ports['page'])}" for p in plans.values()],
            etcd=next(iter(plans.values())).etcd,
            directories={name: answer.directory for name, answer in started.items()},
            certificates=hosts.certificates,
        )
        with identity.using(in_folder(hosts.certificates, CertificateRole.OPERATOR)):
            check_reachable(control_plane.coordinators, LEADS_WITHIN_S)
    except BaseException:
        say("the start has failed; removing what was started")
        stop(hosts, say, plans)
        raise
    return control_plane


def stop(
    hosts: ControlPlaneHosts, say: Say, plans: Mapping[str, HostPlan] | None = None
) -> Sequence[str]:
    """End the parts on the hosts, and remove their data; return the hosts on which that failed, and
    which the record keeps. `plans`: end only their parts, not those of another start."""
    orders = {name: hosts.order(name, STOP) for name in hosts.names}
    if plans is not None:
        orders = {n: replace(order, plan=asdict(plans[n])) for n, order in orders.items()}
    answers = hosts.ask(orders, ANSWER_S)
    failed = []
    for name, answer in answers.items():
        if isinstance(answer, HostFailure):
            failed.append(name)
            say(f"{name} was not stopped, its parts may still run: {answer.reason}")
        elif answer.runs:
            say(f"{name}: stopped; logs are in {answer.directory}")
        else:
            say(f"{name}: nothing ran")
    known = recorded(hosts.directory, damaged_counts=False) or hosts
    left = [name for name in known.names if name in failed or name not in hosts.names]
    if left:
        _write_record(replace(known, names=left))
    else:
        (hosts.here / RECORD).unlink(missing_ok=True)
        shutil.rmtree(hosts.certificates, ignore_errors=True)
    return failed


def check_machine(known: ControlPlaneHosts) -> None:
    """Raise InvalidSpec if `localhost` among the recorded hosts is another machine, with the same
    home directory as this one."""
    if LOCALHOST in known.names and known.machine not in ("", platform.node()):
        raise InvalidSpec(
            "the control plane was started on another machine, which is one of its hosts",
            seen=f"started on {known.machine}, and this is {platform.node()}",
            expected=f"the command on {known.machine}",
            fix=f"If this machine was renamed, give the hosts: shoal down --hosts {LOCALHOST},...",
        )


def recorded(directory: str = "", *, damaged_counts: bool = True) -> ControlPlaneHosts | None:
    """Return the hosts of the recorded control plane, if any. `directory`: as at the start. For a
    damaged record, raises InvalidSpec, or returns None if `damaged_counts` is False."""
    path = ControlPlaneHosts(names=(), directory=directory).here / RECORD
    try:
        return ControlPlaneHosts(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        if not damaged_counts:
            return None
        raise InvalidSpec(
            "the record of the control plane cannot be read",
            seen=f"{path}: {error}",
            expected="a record of `shoal up --hosts`",
            fix="Give the hosts: shoal down --hosts HOST,...",
        ) from error


def _write_record(hosts: ControlPlaneHosts) -> None:
    hosts.here.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = hosts.here / f"{RECORD}.new"
    new.write_text(json.dumps(asdict(replace(hosts, machine=platform.node()))))
    new.replace(hosts.here / RECORD)


# --- checks before the start ---


def _check_record(hosts: ControlPlaneHosts) -> None:
    known = recorded(hosts.directory)
    if known is not None:
        check_machine(known)
    if known is not None and {*known.names} - {*hosts.names}:
        raise InvalidSpec(
            "there is a control plane on other hosts",
            seen=f"{', '.join(known.names)}, in {hosts.here / RECORD}",
            expected="none, or another --dir",
            fix="`shoal down` ends it. If its hosts are gone for good, remove that file.",
        )


def _usable(
    answers: Mapping[str, HostAnswer | HostFailure], verb: str = "be used"
) -> dict[str, HostAnswer]:
    bad = {name: each.reason for name, each in answers.items() if isinstance(each, HostFailure)}
    good = {name: each for name, each in answers.items() if isinstance(each, HostAnswer)}
    own = version("shoal")
    bad |= {
        name: f"it has shoal {each.version}, and this machine has {own}"
        for name, each in good.items()
        if each.version != own
    }
    if bad:
        raise Unavailable(
            f"a host of the control plane cannot {verb}: {', '.join(bad)}",
            seen="; ".join(f"{name}: {reason}" for name, reason in bad.items()),
            expected="all hosts, as the start of a control plane needs each of them",
            fix=ADVICE if verb == "be used" else "",
        )
    return good


def _check_free(found: Mapping[str, HostAnswer]) -> None:
    if running := [name for name, answer in found.items() if answer.runs]:
        raise InvalidSpec(
            "a control plane is up",
            seen=f"its parts on {', '.join(running)}",
            expected="hosts without one",
            fix="Use it: `shoal status` with the addresses that its start has printed. `shoal down`"
            " ends it.",
        )
    if kept := [name for name, answer in found.items() if answer.has_data]:
        raise InvalidSpec(
            "there is data of a control plane that no longer runs",
            seen=", ".join(f"{found[name].directory} on {name}" for name in kept),
            expected="hosts without one",
            fix="`shoal down` removes it, with all that the cluster knew of its jobs.",
        )


def _addresses(found: Mapping[str, HostAnswer]) -> dict[str, str]:
    """Raises InvalidSpec if the hosts cannot reach each other at the addresses at which ssh has
    reached them."""
    clients = Counter(each.client for each in found.values() if each.client)
    usual = clients.most_common(1)[0][0] if clients else "127.0.0.1"
    addresses = {name: answer.address or usual for name, answer in found.items()}
    loopback = [name for name, each in addresses.items() if ip_address(each).is_loopback]
    if loopback and len(loopback) < len(addresses):
        raise InvalidSpec(
            "other hosts cannot reach a host",
            seen=", ".join(f"{name} at {addresses[name]}" for name in loopback),
            expected="addresses at which all hosts reach each other",
            fix=f"Name this machine {LOCALHOST}, and other hosts by names with such an address.",
        )
    return addresses


# --- plans and certificates ---


def _plans(
    config: ControlPlaneConfig,
    addresses: Mapping[str, str],
    ports: Mapping[str, Mapping[str, int]],
) -> dict[str, HostPlan]:
    token = secrets.token_hex(4)
    # A host's name may have characters with which etcd separates names.
    members = {name: f"etcd-{number}" for number, name in enumerate(addresses)}
    at = {name: HostPorts(**ports[name]) for name in addresses}
    peers = {members[name]: _at(addresses[name], at[name].peer) for name in addresses}
    clients = {name: _at(addresses[name], at[name].etcd) for name in addresses}
    num_hosts, plans, first = len(addresses), {}, 0
    for number, name in enumerate(addresses):
        num_servers = len(range(number, config.num_parameter_servers, num_hosts))
        member = EtcdAddresses(name=members[name], token=token, client=clients[name], peers=peers)
        others = [each for other, each in clients.items() if other != name]
        plans[name] = HostPlan(
            address=addresses[name],
            ports=ports[name],
            etcd=[clients[name], *others],
            member=asdict(member),
            num_parameter_servers=num_servers,
            first_parameter_server=first,
            snapshot_roots=config.snapshot_roots,
            prefix=config.prefix,
            limits=config.limits,
            verbose=config.verbose,
        )
        first += num_servers
    return plans


def _make_certificates(path: Path, addresses: Sequence[str]) -> Mapping[str, str]:
    shutil.rmtree(path, ignore_errors=True)
    hosts = [*dict.fromkeys((*addresses, "127.0.0.1", "localhost"))]
    folder, of_etcd = CertificateFolder(path), CertificateFolder(path / ETCD_CERTIFICATES)
    folder.init(VALID, hosts)
    of_etcd.init(roles=())
    for holder in etcd_holders(hosts, VALID):
        of_etcd.issue(holder)
    roles = (CertificateRole.COORDINATOR, CertificateRole.SERVER)
    stems = [role.value for role in roles] + [
        f"{ETCD_CERTIFICATES}/{n}" for n in ("etcd", "etcd-client")
    ]
    names = [CA_FILE, f"{ETCD_CERTIFICATES}/{CA_FILE}"]
    names += [f"{stem}.{end}" for stem in stems for end in ("crt", "key")]
    return {name: (path / name).read_text() for name in names}


def _at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
