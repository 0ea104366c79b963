"""A proxy named by environment variables, to which Shoal must never connect."""

import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Self

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "ftp_proxy")


class DeadProxy:
    """A port that accepts connections without an answer, and records if there was one."""

    def __enter__(self) -> Self:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """Proxy variables, in both spellings, without an exception for any host."""
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        named = dict.fromkeys(VARIABLES, url) | {"no_proxy": ""}
        return named | {name.upper(): value for name, value in named.items()}

    def was_asked(self) -> bool:
        """Accept a connection that was made, and return whether there was one."""
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True
