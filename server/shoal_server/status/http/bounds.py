"""Counts of an HTTP port, and its limits."""

from shoal_server.serving.admission.config import HttpLimits
from shoal_server.serving.admission.connections import ConnectionCounts
from shoal_server.status.http.streams import LiveStreams


class HttpBounds:
    """Counts and limits of one server. Used only on the event loop."""

    def __init__(self, limits: HttpLimits | None = None) -> None:
        self.limits = limits or HttpLimits()
        self.connections = ConnectionCounts(
            "http",
            most=self.limits.most_connections,
            most_per_peer=self.limits.http_connections_per_peer,
        )
        self.streams = LiveStreams(self.limits)
