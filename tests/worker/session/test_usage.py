"""The use of processor and network that the status page shows."""

import time
from pathlib import Path

from shoal.session.usage import TrafficCounts, UsageMeter, host_traffic, memory_bytes


def interface(root: Path, name: str, received: int, sent: int, *, is_device: bool) -> None:
    folder = root / "sys/class/net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    (folder / "statistics" / "rx_bytes").write_text(f"{received}\n")
    (folder / "statistics" / "tx_bytes").write_text(f"{sent}\n")
    if is_device:
        (folder / "device").mkdir(exist_ok=True)


def test_bytes_that_pass_through_several_interfaces_count_once(tmp_path: Path) -> None:
    """Interfaces of devices count, and not bridges, which pass the same bytes. Without devices, as
    in a container, all but loopback count."""
    interface(tmp_path, "lo", 1 << 40, 1 << 40, is_device=False)
    interface(tmp_path, "veth1", 100, 10, is_device=False)
    assert host_traffic(tmp_path) == TrafficCounts(received=100, sent=10)
    interface(tmp_path, "eth0", 7, 3, is_device=True)
    interface(tmp_path, "eth1", 2, 1, is_device=True)
    assert host_traffic(tmp_path) == TrafficCounts(received=9, sent=4)


def test_traffic_over_infiniband_counts(tmp_path: Path) -> None:
    """Ports count words of four bytes. These include IP over InfiniBand, so `ib0` is left out."""
    interface(tmp_path, "eth0", 7, 3, is_device=True)
    interface(tmp_path, "ib0", 1000, 1000, is_device=True)
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "port_rcv_data").write_text("100\n")
    (counters / "port_xmit_data").write_text("50\n")
    assert host_traffic(tmp_path) == TrafficCounts(received=407, sent=203)


def test_use_is_that_since_the_last_reading(tmp_path: Path) -> None:
    """A counter that starts again counts as no traffic."""
    interface(tmp_path, "eth0", 1000, 500, is_device=True)
    meter = UsageMeter(tmp_path)
    interface(tmp_path, "eth0", 3000, 100, is_device=True)
    used_s, began_s = time.process_time(), time.monotonic()
    while time.process_time() < used_s + 0.01:
        pass
    usage = meter.read()
    assert usage is not None
    assert usage.cpu_cores >= 0.01 / (time.monotonic() - began_s + 0.1)
    assert (usage.received_bytes_per_s > 0, usage.sent_bytes_per_s) == (True, 0)


def test_a_machine_without_counters_has_no_traffic(tmp_path: Path) -> None:
    assert host_traffic(tmp_path) == TrafficCounts(received=0, sent=0)
    assert memory_bytes() > 1 << 20
