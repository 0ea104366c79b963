"""Renewal of a lease on its own thread.

If thousands of members join at once, a call on the event loop may take longer than a lease lasts,
and a leader that is merely slow would lose its term. A leader with a stuck loop must lose its term:
without `report_alive`, renewals stop.
"""

import threading
import time
from itertools import cycle

import grpc
import structlog

from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.etcd import etcd_pb2_grpc as stubs
from shoal_proto.tls.channels import direct_channel
from shoal_server.etcd.api import ConfirmedRenewal, LeaseId
from shoal_server.etcd.remote.channel import CHANNEL_OPTIONS
from shoal_server.etcd.remote.connection import Connections

log = structlog.get_logger(__name__)

RENEWALS_A_TTL = 4
TRUSTED_TTLS = 4
"""TTLs for which the lease is renewed after the last `report_alive`."""


class LeaseThread:
    """Thread that renews one lease. Any thread may call its methods, which do not block."""

    def __init__(self, connections: Connections, lease: LeaseId, ttl_s: float) -> None:
        self._connections = connections
        self._request = pb.LeaseKeepAliveRequest(ID=lease)
        self._ttl_s = ttl_s
        self._confirmed: ConfirmedRenewal | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self.report_alive()
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    def report_alive(self) -> None:
        self._trusted_until_s = time.monotonic() + TRUSTED_TTLS * self._ttl_s

    @property
    def confirmed(self) -> ConfirmedRenewal | None:
        return self._confirmed

    def end(self) -> None:
        self._over.set()
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        for address in cycle(self._connections.config.endpoints):
            credentials = self._connections.load_credentials()
            with direct_channel(address, credentials, CHANNEL_OPTIONS) as channel:
                self._renew_at(stubs.LeaseStub(channel))
            if self._over.is_set():
                return

    def _renew_at(self, stub: stubs.LeaseStub) -> None:
        while not self._over.wait(self._ttl_s / RENEWALS_A_TTL):
            metadata = self._connections.known_metadata()
            if metadata is None or time.monotonic() >= self._trusted_until_s:
                continue
            sent_s = time.monotonic()
            try:
                ttl_s = self._renewed(stub, metadata)
            except grpc.RpcError as error:
                # Renewals on the event loop report failures, and log in to etcd again.
                log.debug("lease_not_renewed_in_background", reason=str(error))
                return
            if ttl_s is None:
                log.debug("lease_not_renewed_in_background", reason="the call had no answer")
                return
            if ttl_s <= 0:
                self._over.set()
                return
            self._confirmed = ConfirmedRenewal(sent_s=sent_s, ttl_s=ttl_s)

    def _renewed(
        self, stub: stubs.LeaseStub, metadata: tuple[tuple[str, str], ...]
    ) -> float | None:
        """Renew once; return the TTL (0: the lease is gone), or None if etcd did not answer. Raises
        grpc.RpcError."""
        timeout_s = self._connections.config.attempt_timeout_s
        call = stub.LeaseKeepAlive(iter((self._request,)), timeout=timeout_s, metadata=metadata)
        with self._lock:
            self._call = call
        if self._over.is_set():
            call.cancel()
        return max((float(answer.TTL) for answer in call), default=None)
