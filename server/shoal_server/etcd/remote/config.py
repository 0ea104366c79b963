"""How to reach etcd."""

from dataclasses import dataclass, field
from pathlib import Path

from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """Where etcd is, who we are to it, and how long we wait for it."""

    endpoints: tuple[str, ...]
    """host:port of each member. All of one cluster; the next is tried when one fails."""
    user: str = ""
    """User name; empty: log in as nobody, or as whom the client certificate names."""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    """PEM file of the authority that signed etcd's certificate. Setting it turns TLS on."""
    cert_file: Path | None = None
    """PEM file of our certificate, where etcd asks for one."""
    key_file: Path | None = None
    """PEM file of the certificate's key."""
    timeout_s: float = 10.0
    """A call that no endpoint answered for so long is given up and raises."""
    attempt_timeout_s: float = 2.5
    """An endpoint that has not answered a repeatable call for so long is taken for dead."""
    silence_s: float = 3.0
    """A watch that heard nothing for so long, though it asked, goes to the next endpoint."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise InvalidSpec("no etcd endpoint", expected="host:port[,host:port...]")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint)
        if bool(self.user) != bool(self.password):
            missing = "password" if self.user else "user"
            raise InvalidSpec(f"etcd {missing} is missing", expected="both user and password")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidSpec("half a client certificate", expected="both cert_file and key_file")
        if self.cert_file is not None and self.ca_file is None:
            raise InvalidSpec("a client certificate without TLS", expected="ca_file as well")
        if not 0 < self.attempt_timeout_s <= self.timeout_s:
            raise InvalidSpec(
                "etcd time limits contradict each other",
                seen=f"attempt_timeout_s {self.attempt_timeout_s}, timeout_s {self.timeout_s}",
                expected="0 < attempt_timeout_s <= timeout_s",
            )
        if not self.silence_s > 0:
            raise InvalidSpec("bad silence_s", seen=str(self.silence_s), expected="above 0")


def parse_endpoints(text: str) -> tuple[str, ...]:
    """The endpoints of `host:port,host:port`. Raises InvalidSpec."""
    endpoints = tuple(part.strip() for part in text.split(",") if part.strip())
    if not endpoints:
        raise InvalidSpec("no etcd endpoint", seen=repr(text), expected="host:port[,host:port...]")
    for endpoint in endpoints:
        _check_endpoint(endpoint)
    return endpoints


def _check_endpoint(endpoint: str) -> None:
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidSpec("bad etcd endpoint", seen=repr(endpoint), expected="host:port")
    if "/" in host:
        raise InvalidSpec(
            "bad etcd endpoint",
            seen=repr(endpoint),
            expected="host:port without a scheme",
            fix="Leave http:// or https:// out; a CA file turns TLS on.",
        )
