"""Use of processor, memory and network by a member, for the status page."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_PORT_WORD_BYTES = 4
"""Unit of the counters of InfiniBand ports."""


@dataclass(frozen=True, kw_only=True)
class TrafficCounts:
    """Bytes that a host has received and sent so far."""

    received: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Use over one interval."""

    cpu_cores: float
    received_bytes_per_s: float
    sent_bytes_per_s: float


class UsageMeter:
    """Measures use from call to call of `read`."""

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: the folder with `proc` and `sys`."""
        self._root = root
        self._read_s, self._cpu_s = time.monotonic(), time.process_time()
        self._traffic = host_traffic(root)

    def read(self) -> Usage | None:
        """Return the use since the last call; None if no time has passed."""
        before_s, cpu_s, traffic = self._read_s, self._cpu_s, self._traffic
        self._read_s, self._cpu_s = time.monotonic(), time.process_time()
        self._traffic = host_traffic(self._root)
        seconds = self._read_s - before_s
        if seconds <= 0:
            return None
        # Counts fall if an interface is removed: the rates are then 0.
        return Usage(
            cpu_cores=(self._cpu_s - cpu_s) / seconds,
            received_bytes_per_s=max(0, self._traffic.received - traffic.received) / seconds,
            sent_bytes_per_s=max(0, self._traffic.sent - traffic.sent) / seconds,
        )


def memory_bytes() -> int:
    """Return the bytes that torch has reserved on this process's GPU; if none are reserved, the
    bytes of the process's resident memory."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and (held := torch.cuda.memory_reserved()):
        return held
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def host_traffic(root: Path) -> TrafficCounts:
    """Return the bytes that the host's network devices, InfiniBand included, have counted.

    Bridges, tunnels and bonds count only if no device is seen, as in a container.
    """
    received, sent = 0, 0
    for interface in _counting_interfaces(root):
        received += _number_in(interface / "statistics/rx_bytes")
        sent += _number_in(interface / "statistics/tx_bytes")
    for port in root.glob("sys/class/infiniband/*/ports/*/counters"):
        received += _PORT_WORD_BYTES * _number_in(port / "port_rcv_data")
        sent += _PORT_WORD_BYTES * _number_in(port / "port_xmit_data")
    return TrafficCounts(received=received, sent=sent)


def _counting_interfaces(root: Path) -> list[Path]:
    every = [each for each in root.glob("sys/class/net/*") if each.name != "lo"]
    devices = [each for each in every if (each / "device").exists()]
    # IP over InfiniBand is in the counters of the ports.
    return [each for each in devices or every if not each.name.startswith("ib")]


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
