"""The readers of a series: their leases and installed versions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from shoal_server.core.publications.limits import (
    HELD_S,
    MAX_LEASES,
    MAX_READERS,
    READER_FORGOTTEN_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderReport:
    reader: str
    """Id of the reader's process. A second process with this id would end the first one's leases.
    """
    leased: Sequence[int] = ()
    """Versions to lease; all other leases of the reader end."""
    installed: int = 0
    """The installed version; 0: none since the process began."""
    installed_digest: bytes = b""
    serves_at: str = ""
    is_leaving: bool = False
    fetch_s: float = 0.0
    fetch_bytes: int = 0
    sequence: int = 0
    """Rises with each report, also over restarts of the reader."""


@dataclass(slots=True)
class Reader:
    report: ReaderReport
    seen_s: float
    since_s: float
    leases: dict[int, float] = field(default_factory=dict)
    """End of each lease, by version."""


class TooManyReaders(Exception):
    """Raised if the bound on readers, or on one reader's leases, is reached."""


class InstalledOlder(Exception):
    """Raised if a reader reports an older installed version than before."""

    def __init__(self, before: int) -> None:
        super().__init__(f"version {before} was installed before")
        self.before = before


class Readers:
    """The readers of one series. A new leader starts with none."""

    def __init__(self) -> None:
        self._known: dict[str, Reader] = {}

    @property
    def known(self) -> dict[str, Reader]:
        return self._known

    def report(
        self, report: ReaderReport, kept: Collection[int], now_s: float
    ) -> tuple[list[int], list[int]]:
        """Note a report. Return the versions that the reader now leases, and those asked for that
        are gone.

        A reader that leaves is forgotten, and both lists are empty. An outdated report changes
        nothing, and all its versions are returned as gone. Raises TooManyReaders or InstalledOlder,
        and then changes nothing.
        """
        known = self._known.get(report.reader)
        # A lower number is accepted after the leases have ended: the reader may be a new process.
        is_recent = known is not None and now_s < known.seen_s + HELD_S
        if known is not None and is_recent and report.sequence < known.report.sequence:
            # The reader has sent a newer report and does not wait for this answer.
            return [], sorted(set(report.leased))
        if report.is_leaving:
            self._known.pop(report.reader, None)
            return [], []
        if len(set(report.leased)) > MAX_LEASES:
            raise TooManyReaders(f"more than {MAX_LEASES} leases of one reader")
        if known is None and len(self._known) >= MAX_READERS:
            raise TooManyReaders(f"{MAX_READERS} readers")
        if known is not None and 0 < report.installed < known.report.installed:
            raise InstalledOlder(known.report.installed)
        leased = sorted(number for number in set(report.leased) if number in kept)
        gone = sorted(set(report.leased) - set(leased))
        self._known[report.reader] = Reader(
            report=report,
            seen_s=now_s,
            since_s=known.since_s if known is not None else now_s,
            leases=dict.fromkeys(leased, now_s + HELD_S),
        )
        return leased, gone

    def leased(self, now_s: float) -> set[int]:
        return {number for _, number in self.holders_of_leases(now_s)}

    def holders_of_leases(self, now_s: float) -> Iterator[tuple[str, int]]:
        """Pairs of a reader and a version that it leases."""
        for name, reader in self._known.items():
            yield from ((name, n) for n, until_s in reader.leases.items() if until_s > now_s)

    def forget_silent(self, now_s: float) -> bool:
        """Forget readers that were silent for READER_FORGOTTEN_S; True if there were any."""
        silent = [n for n, r in self._known.items() if now_s - r.seen_s > READER_FORGOTTEN_S]
        for name in silent:
            del self._known[name]
        return bool(silent)
