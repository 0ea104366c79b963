"""Streams of server-sent events, limited in total and for each peer."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal_proto.errors import Overloaded
from shoal_server.serving.admission.config import HttpLimits
from shoal_server.status.http.errors import answer


class LiveStreams:
    """Open streams; they end with the server, and do not delay its end."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.closing = asyncio.Event()
        self.num_refused = 0
        self._by_peer: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._by_peer.total()

    def refusal(self, peer: str) -> Overloaded | None:
        """Error for a peer that must not open a further stream; else None."""
        most, most_of_peer = self.limits.live_pages, self.limits.live_pages_per_peer
        if self.num_open >= most:
            what, seen, expected = "too many live pages are open", self.num_open, most
        elif self._by_peer[peer] >= most_of_peer:
            what = f"too many live pages are open from {peer}"
            seen, expected = self._by_peer[peer], most_of_peer
        else:
            return None
        self.num_refused += 1
        return Overloaded(
            what, seen=str(seen), expected=f"at most {expected}", fix="Close some of them."
        )

    def take(self, peer: str) -> None:
        self._by_peer[peer] += 1

    def give_back(self, peer: str) -> None:
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class LiveResponse(StreamingResponse):
    """A stream that is counted while it is sent, or refused if there are too many."""

    def __init__(self, streams: LiveStreams, content: AsyncIterator[bytes]) -> None:
        super().__init__(
            content,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = str(scope["client"][0]) if scope.get("client") else ""
        if refusal := self._streams.refusal(peer):
            await answer(refusal)(scope, receive, send)
            return
        self._streams.take(peer)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.give_back(peer)
