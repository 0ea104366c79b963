"""Options for the connection to etcd."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal_proto.addresses import is_reachable_address
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_prefix
from shoal_server.serving.options import INTERNAL


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Split and check `host:port,host:port`. Raises InvalidSpec."""
    endpoints = tuple(part.strip() for part in text.split(",") if part.strip())
    if not endpoints:
        raise InvalidSpec("no etcd endpoint", seen=repr(text), expected="host:port[,host:port...]")
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    return endpoints


def _parsed(kind: Any, tokens: Sequence[Any]) -> tuple[str, ...]:
    return parse_endpoints(tokens[-1].value)


_ETCD = Group("etcd")


def _option(name: str, metavar: str) -> Parameter:
    return Parameter(name=name, metavar=metavar, group=_ETCD)


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """Endpoints of etcd, credentials, and time limits."""

    endpoints: Annotated[
        tuple[str, ...],
        _option("--etcd", "HOST:PORT,..."),
        Parameter(env_var="SHOAL_ETCD", converter=_parsed, n_tokens=1),
    ] = ("127.0.0.1:2379",)
    """host:port of each etcd member. If one fails, the next is tried."""
    prefix: Annotated[str, _option("--prefix", "/NAME"), Parameter(env_var="SHOAL_ETCD_PREFIX")] = (
        ""
    )
    """Prefix of all keys of this cluster, so that several clusters can share an etcd: the same for
    all its coordinators and parameter servers. By default none: keys begin with /shoal/v1/."""
    user: Annotated[str, _option("--etcd-user", "NAME")] = ""
    """User of etcd. By default none, or the user that the client certificate names."""
    password_file: Annotated[Path | None, _option("--etcd-password-file", "FILE")] = None
    """File with the user's password. Read again at each login."""
    ca_file: Annotated[Path | None, _option("--etcd-ca", "FILE")] = None
    """PEM file of the authority that signed etcd's certificate. Setting it turns TLS on."""
    cert_file: Annotated[Path | None, _option("--etcd-cert", "FILE")] = None
    """PEM file of the client certificate, if etcd asks for one. Read again when it changes."""
    key_file: Annotated[Path | None, _option("--etcd-key", "FILE")] = None
    """PEM file of the certificate's key."""
    timeout_s: Annotated[float, INTERNAL] = 10.0
    """A call raises if no endpoint has answered it for this long."""
    attempt_timeout_s: Annotated[float, INTERNAL] = 2.5
    """A repeatable call that is not answered for this long goes to the next endpoint."""
    silence_s: Annotated[float, INTERNAL] = 3.0
    """A watch that receives nothing for this long, despite progress requests, goes to the next
    endpoint."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise InvalidSpec("no etcd endpoint", expected="host:port[,host:port...]")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint)
        check_prefix(self.prefix)
        if self.password_file is not None:
            self.read_password()
        if bool(self.user) != (self.password_file is not None):
            missing = "password" if self.user else "user"
            raise InvalidSpec(
                f"etcd {missing} is missing", expected="both --etcd-user and --etcd-password-file"
            )
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidSpec(
                "a client certificate needs its key, and a key its certificate",
                expected="both --etcd-cert and --etcd-key",
            )
        if self.cert_file is not None and self.ca_file is None:
            raise InvalidSpec("a client certificate without TLS", expected="--etcd-ca as well")
        if not 0 < self.attempt_timeout_s <= self.timeout_s:
            raise InvalidSpec(
                "etcd time limits contradict each other",
                seen=f"attempt_timeout_s {self.attempt_timeout_s}, timeout_s {self.timeout_s}",
                expected="0 < attempt_timeout_s <= timeout_s",
            )
        if not self.silence_s > 0:
            raise InvalidSpec("bad silence_s", seen=str(self.silence_s), expected="above 0")

    def read_password(self) -> str:
        """Password in the file now; empty without a file. Raises InvalidSpec."""
        if self.password_file is None:
            return ""
        try:
            return self.password_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(
                "the etcd password file cannot be read", seen=str(error), expected="a readable file"
            ) from error


def _check_endpoint(endpoint: str) -> None:
    if not is_reachable_address(endpoint):
        raise InvalidSpec("bad etcd endpoint", seen=repr(endpoint), expected="host:port")
    if "/" in endpoint:
        raise InvalidSpec(
            "bad etcd endpoint",
            seen=repr(endpoint),
            expected="host:port without a scheme",
            fix="Leave http:// or https:// out; a CA file turns TLS on.",
        )
