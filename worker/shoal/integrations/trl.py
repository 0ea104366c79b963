"""Clients for TRL's trainers: they publish weights as versions of a series, which vLLM installs.

Start vLLM with `--weight-transfer-config '{"backend": "shoal"}'`; see `shoal.integrations.vllm`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import requests
import structlog
from torch import Tensor
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient as _WeightTransfer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient as _VLLMClient

from shoal.weights.script import publish
from shoal.weights.version import WeightVersion
from shoal_proto.errors import InvalidSpec

log = structlog.get_logger(__name__)

SERIES_VARIABLE = "SHOAL_SERIES"
COMMIT_S = 600.0


def use_series(series: str, *, coordinator: str | None = None) -> None:
    """Make TRL's trainers with a vLLM server (`vllm_mode="server"`: GRPO, RLOO, ...) publish the
    series. Call it before the trainer is made.

        shoal.integrations.trl.use_series("rl/policy", coordinator="host:7700")
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server", ...))
    """

    class Client(VLLMClient):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, series=series, coordinator=coordinator, **kwargs)

    vllm_generation.VLLMClient = Client


class _Publisher:
    """Publishes tensors as a version. Raises DeadlineExceeded if it is not committed in
    COMMIT_S."""

    def __init__(self, series: str | None, coordinator: str | None) -> None:
        self.series = series or os.environ.get(SERIES_VARIABLE, "")
        self.coordinator = coordinator
        if not self.series:
            raise InvalidSpec(
                "no series was named", expected=f"series='JOB/NAME', or {SERIES_VARIABLE}"
            )

    @property
    def init_info(self) -> dict[str, Any]:
        """Settings for vLLM's engines."""
        return {"series": self.series, "coordinator": self.coordinator}

    def publish(self, named: Iterable[tuple[str, Tensor]]) -> WeightVersion:
        tensors = {name: tensor.detach() for name, tensor in named}
        ticket = publish(self.series, tensors, coordinator=self.coordinator)
        version = ticket.wait("committed", timeout=COMMIT_S)
        assert version is not None, "a committed ticket has a version"
        return version


class VLLMClient(_VLLMClient):
    """TRL's client of a vLLM server, which publishes versions of a series instead of broadcasting
    over NCCL.

    `series`: JOB/NAME; None: the environment variable SHOAL_SERIES. Raises InvalidSpec without
    either. An update raises DeadlineExceeded after 600 s without a commit.
    """

    def __init__(
        self, *args: Any, series: str | None = None, coordinator: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._publisher = _Publisher(series, coordinator)
        self._collected: dict[str, Tensor] | None = None
        self.version: WeightVersion | None = None

    def init_communicator(self, device: Any = 0) -> None:
        """Send the series' name to the engines, which subscribe to it."""
        info = self._publisher.init_info
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})

    def close_communicator(self) -> None:
        """Do nothing: the series is released when the process ends."""

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Publish all updates of the block as one version; none if the block raises."""
        self._collected = {}
        try:
            yield
            self._install(self._collected.items())
        finally:
            self._collected = None

    def update_named_params(
        self, metadata: Any, named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        if self._collected is not None:
            # TRL gathers all parameters into the same memory.
            self._collected |= {name: tensor.detach().clone() for name, tensor in named_params}
            return
        self._install((name, tensor.detach().clone()) for name, tensor in named_params)

    def _install(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.version = self._publisher.publish(named)
        number = self.version.number
        self._post(f"{self.base_url}/start_weight_update", json={})
        self._post(f"{self.base_url}/update_weights", json={"update_info": {"version": number}})
        label = {"weight_version": str(number)}
        self._post(f"{self.base_url}/finish_weight_update", json=label)


class WeightTransferClient(_WeightTransfer):
    """Weight transfer client for TRL's asynchronous trainers.

        client = trl.experimental.async_grpo.vllm_client.VLLMClient("http://engine:8000")
        AsyncGRPOTrainer(..., weight_transfer=WeightTransferClient(client, series="rl/policy"))

    `weight_update_info` has no effect: a version describes its tensors itself. `series` as in
    `VLLMClient`.
    """

    def __init__(
        self,
        vllm_client: Any,
        weight_update_info: dict[str, Any] | None = None,
        weight_sync_timeout: int = 1800,
        *,
        series: str | None = None,
        coordinator: str | None = None,
    ) -> None:
        self.vllm = vllm_client
        self.weight_sync_timeout = weight_sync_timeout
        self._publisher = _Publisher(series, coordinator)
        self.version: WeightVersion | None = None

    def init_weight_transfer(self) -> None:
        self.vllm.wait_for_server_ready()
        self.vllm.init_weight_transfer_engine(
            self._publisher.init_info, timeout=self.weight_sync_timeout
        )

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.version = self._publisher.publish(
            (name, tensor.detach().clone()) for name, tensor in iterator
        )
        limit = self.weight_sync_timeout
        self.vllm.start_weight_update(timeout=limit)
        self.vllm.update_weights({"version": self.version.number}, timeout=limit)
        # TRL's method sends no version: vLLM would label its outputs with the previous one.
        response = requests.post(
            f"{self.vllm.server_url}/finish_weight_update",
            json={"weight_version": str(self.version.number)},
            timeout=limit,
        )
        response.raise_for_status()

    def destroy(self) -> None:
        """Do nothing: the series is released when the process ends."""
