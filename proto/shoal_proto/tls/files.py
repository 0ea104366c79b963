"""A certificate with its key and the trusted authority, in files that are read when they change."""

import os
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from shoal_proto.errors import InvalidSpec
from shoal_proto.forks.openssl import NO_FORK

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
LOOK_WITHIN_S = 0.2
"""Longest time that `material` waits for the files, which may be on a network. Heartbeats wait for
it, too."""
RENEWAL_S = 0.1
"""Time in which a renewal replaces a key and its certificate, one after the other."""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of the three PEM files."""

    ca: Path
    """Authorities that sign other processes' certificates."""
    cert: Path
    """Certificate of this process, with the intermediate ones."""
    key: Path
    """Private key, without a passphrase."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that name these files for another process."""
        # Not resolved: the files of a Kubernetes Secret are links to a folder that each renewal
        # removes.
        return {
            "SHOAL_TLS_CA": str(self.ca.absolute()),
            "SHOAL_TLS_CERT": str(self.cert.absolute()),
            "SHOAL_TLS_KEY": str(self.key.absolute()),
        }


@dataclass(frozen=True, eq=False)
class TlsMaterial:
    """Contents of the files. Compared by identity."""

    ca: bytes
    cert: bytes
    key: bytes
    server: ssl.SSLContext
    """Accepts connections whose other end has a certificate."""
    open: ssl.SSLContext
    """Accepts connections without a client's certificate, as of browsers."""
    client: ssl.SSLContext
    """Opens connections. Each renewal makes a new one: an authority removed from the files is no
    longer trusted."""


class TlsIdentity:
    """The files of one process. Thread-safe.

    Changed files are read when `material` is next used, at most a second late. While the disk does
    not answer, or the files cannot be read or do not match, the earlier ones stay in use.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidSpec if a file cannot be read or is not PEM, or the key does not match."""
        self.files = files
        self._seen = self._stamps()
        try:
            self._material = _read(files)
        except InvalidSpec:
            # A renewal may have replaced only the key, or only the certificate, so far.
            time.sleep(RENEWAL_S)
            self._material = _read(files)
        self._looked_s = time.monotonic()
        self._looking = threading.Thread()

    @property
    def material(self) -> TlsMaterial:
        """Current material; the same object until the files change."""
        looking = self._start_look()
        if looking is not None:
            looking.join(LOOK_WITHIN_S)
        return self._material

    def _start_look(self) -> threading.Thread | None:
        """Look at the files on a thread of its own, at most once a second and one at a time."""
        # NO_FORK: no child is forked while the thread is being started. So in a child, `is_alive`
        # is False.
        with NO_FORK:
            now_s = time.monotonic()
            if self._looking.is_alive() or now_s - self._looked_s < LOOK_EVERY_S:
                return None
            self._looked_s = now_s
            self._looking = threading.Thread(
                target=self._look, name="shoal-certificate", daemon=True
            )
            # RuntimeError: no further thread is possible, for example while the process ends.
            with suppress(RuntimeError):
                self._looking.start()
                return self._looking
        return None

    def _look(self) -> None:
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return
            found = _read(self.files)
        except InvalidSpec as error:
            log.warning("certificate_not_renewed", cert=str(self.files.cert), reason=str(error))
            return
        # In this order: a child that is forked in between reads the files again.
        self._material = found
        self._seen = stamps
        log.info("certificate_reloaded", cert=str(self.files.cert))

    def _stamps(self) -> list[tuple[int, int, int]]:
        try:
            found = [each.stat() for each in (self.files.ca, self.files.cert, self.files.key)]
        except OSError as error:
            raise _unreadable(error) from error
        return [(each.st_mtime_ns, each.st_ino, each.st_size) for each in found]


def _read(files: TlsFiles) -> TlsMaterial:
    try:
        ca, cert, key = (each.read_bytes() for each in (files.ca, files.cert, files.key))
    except OSError as error:
        raise _unreadable(error) from error
    # The disk may hang, and `material` waits for NO_FORK: within it nothing is read from the disk.
    with NO_FORK:
        return _material(files, ca, cert, key)


def _material(files: TlsFiles, ca: bytes, cert: bytes, key: bytes) -> TlsMaterial:
    in_memory = os.memfd_create("shoal-certificate")
    try:
        os.write(in_memory, cert + b"\n" + key)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        # Connections last long: session tickets save nothing and cost messages.
        server.num_tickets = 0
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, anybody, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=ca.decode("ascii"))
            context.load_cert_chain(f"/proc/self/fd/{in_memory}")
    except ssl.SSLError as error:
        raise InvalidSpec(
            "the TLS files contain no certificate with its key",
            seen=f"{error.reason or error} with {files.cert}, {files.key}, {files.ca}",
            expected="PEM files: a certificate, its own private key without a passphrase, and the"
            " authority",
            fix="`shoal certs issue` makes them.",
        ) from error
    except ValueError as error:
        raise InvalidSpec(
            "the authority's file contains no certificate",
            seen=f"{files.ca}: {error}",
            expected="PEM",
        ) from error
    finally:
        os.close(in_memory)
    return TlsMaterial(ca=ca, cert=cert, key=key, server=server, open=anybody, client=client)


def _unreadable(error: OSError) -> InvalidSpec:
    return InvalidSpec(
        "a TLS file cannot be read",
        seen=str(error),
        expected="a readable file",
        fix="`shoal certs init` and `shoal certs issue` make them.",
    )
