"""Addresses `host:port`."""

from shoal_proto.errors import InvalidSpec


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`. Raises InvalidSpec."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not (host and _is_port(port)):
        raise InvalidSpec("bad address", seen=repr(address), expected="host:port")
    return host, int(port)


def is_reachable_address(address: str) -> bool:
    """True for `host:port` with a port from 1."""
    host, _, port = address.rpartition(":")
    return bool(host.strip("[]")) and _is_port(port) and int(port) > 0


def join_address(host: str, port: int | str) -> str:
    """host:port, with an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_port(text: str) -> bool:
    # "²" is a digit, and int() does not convert it.
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536
