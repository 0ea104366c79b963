"""Prometheus metrics of a launcher."""

import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any

from shoal.launcher.worker_slots import DRAINED, Exit, WorkerSlot
from shoal_proto.addresses import split_address
from shoal_proto.errors import AddressInUse, InvalidSpec
from shoal_proto.exit_codes import exit_cause

LOOPBACK = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """Parse `[HOST:]PORT`; a port alone means 127.0.0.1. Raises InvalidSpec."""
    host, _, port = text.rpartition(":")
    try:
        return split_address(f"{host or LOOPBACK}:{port}")
    except InvalidSpec as error:
        raise InvalidSpec("bad --metrics", seen=repr(text), expected="[HOST:]PORT") from error


@contextmanager
def serve_metrics(address: str, slots: Sequence[WorkerSlot]) -> Iterator[None]:
    """Serve the metrics within the block, if there is an address. Raises InvalidSpec without
    prometheus_client, and AddressInUse if the address cannot be listened on."""
    if not address:
        yield
        return
    host, port = parse_address(address)
    try:
        prometheus = import_module("prometheus_client")
    except ImportError as error:
        raise InvalidSpec(
            "--metrics needs the package prometheus-client",
            seen=str(error),
            fix="pip install prometheus-client",
        ) from error
    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(LauncherCollector(slots))
    try:
        server, thread = prometheus.start_http_server(port, host, registry)
    except OSError as error:
        raise AddressInUse(
            f"cannot serve metrics at {host}:{port}",
            seen=str(error),
            expected="an address of this machine, and a free port that this user may open",
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class LauncherCollector:
    """Collects metrics, on the server's thread: safe, as exits are only appended."""

    def __init__(self, slots: Sequence[WorkerSlot]) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Any]:
        core = import_module("prometheus_client.core")
        info = core.InfoMetricFamily("shoal_build", "The release of this process.")
        python = platform.python_version()
        values = {"version": version("shoal"), "python": python, "part": "launcher"}
        info.add_metric([], values)
        yield info
        running = sum(slot.process is not None for slot in self._slots)
        yield core.GaugeMetricFamily(
            "shoal_launcher_running_workers", "Worker processes that run.", value=running
        )
        yield core.GaugeMetricFamily(
            "shoal_launcher_wanted_workers", "Worker processes asked for.", value=len(self._slots)
        )
        exits = [each for slot in self._slots for each in tuple(slot.exits)]
        ended = core.CounterMetricFamily(
            "shoal_launcher_worker_exits",
            "Worker processes that ended, by cause.",
            labels=["cause"],
        )
        counts = {"completed": 0, **Counter(_cause(each) for each in exits)}
        for cause, count in sorted(counts.items()):
            ended.add_metric([cause], count)
        yield ended
        restarts = sum(max(0, len(s.exits) - (s.process is None)) for s in self._slots)
        yield core.CounterMetricFamily(
            "shoal_launcher_worker_restarts",
            "Worker processes that were started to replace one that had ended.",
            value=restarts,
        )


def _cause(exited: Exit) -> str:
    if exited.code == DRAINED:
        return "drained"
    if exited.code == 0:
        return "completed"
    return exit_cause(exited.code)
