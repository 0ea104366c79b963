"""Checkpoint engine for verl: actors publish versions of a series, and rollouts fetch them.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: shoal
      custom_backend_module: shoal.integrations.verl
      engine_kwargs: {shoal: {series: rl/policy, coordinator: "host:7700"}}

A rollout that is slow, dead or new delays no other process. Each rollout gets a whole, verified
version: the newest one, or that of the step that verl asks for. After a restart of the training,
rollouts get versions of the new run only."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import structlog
import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache

from shoal.weights.script import publish, subscribe
from shoal.weights.subscription import Subscription, Weights
from shoal.weights.version import WeightVersion
from shoal_proto.errors import InvalidSpec, VersionGone

log = structlog.get_logger(__name__)

SERIES_VARIABLE = "SHOAL_SERIES"
WAIT_S = 600.0
"""Limit of waits for a version, and for its commit."""


@CheckpointEngineRegistry.register("shoal")
class ShoalCheckpointEngine(CheckpointEngineWithCache):
    """A process' access to a series: rank 0 of the actors publishes, rollouts read.

    `series`: JOB/NAME; None: the environment variable SHOAL_SERIES. Raises InvalidSpec without
    either. `keep` and `copies` as in `shoal.publish`.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        is_master: bool = False,
        series: str | None = None,
        coordinator: str | None = None,
        keep: int = 2,
        copies: int = 2,
    ) -> None:
        self.is_master = is_master
        self.series = series or os.environ.get(SERIES_VARIABLE, "")
        if not self.series:
            raise InvalidSpec(
                "no series was named",
                expected=f"engine_kwargs: {{shoal: {{series: JOB/NAME}}}}, or {SERIES_VARIABLE}",
            )
        self.coordinator, self.keep, self.copies = coordinator, keep, copies
        self._subscription: Subscription | None = None
        self._weights: Weights | None = None
        self._newer_than = 0
        """Newest version before the present synchronisation."""

    # --- what verl's process groups need, and versions do not ---

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {"receives": [True] * rollout_world_size}

    def init_process_group(self, *, receives: bool = False, **kwargs: Any) -> None:
        """Record the newest version, on rollouts: this synchronisation's version is higher.

        verl calls this on all processes before an actor sends.
        """
        if receives:
            newest = self._subscribed().newest()
            self._newer_than = 0 if newest is None else newest.number

    def finalize(self) -> None:
        """Do nothing. The last version received stays in memory."""

    # --- versions ---

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> WeightVersion | None:
        """Publish `weights` as this step's version; return it once it is committed.

        Other ranks than the publisher exhaust `weights`, as each yield is a collective, and return
        None. Raises DeadlineExceeded after WAIT_S.
        """
        if not self.is_master:
            for _ in weights:
                pass
            return None
        tensors = {name: tensor.detach() for name, tensor in weights}
        if torch.accelerator.is_available():
            # The thread below copies on its own stream.
            torch.accelerator.synchronize()
        ticket = await asyncio.to_thread(
            publish,
            self.series,
            tensors,
            coordinator=self.coordinator,
            step=global_steps or 0,
            keep=self.keep,
            copies=self.copies,
        )
        return await asyncio.to_thread(ticket.wait, "committed", WAIT_S)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors of this step's version; without a step, of the newest version.

        The version is reported as installed once the last tensor is consumed. After
        `init_process_group`, only later versions count. Raises VersionGone if the step's version is
        not kept, DeadlineExceeded if none appears within WAIT_S, and what `Subscription.fetch`
        raises.
        """
        subscription = self._subscribed()
        version = await self._version_of(global_steps)
        self._weights = await subscription.fetch_async(version)
        for name, tensor in self._weights.items():
            yield name, tensor
        subscription.installed(self._weights)

    async def get_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the tensors of the last version received, from memory. Raises InvalidSpec if there
        is none."""
        if self._weights is None:
            raise InvalidSpec("no version was received", expected="receive_weights() first")
        for name, tensor in self._weights.items():
            yield name, tensor

    def _subscribed(self) -> Subscription:
        if self._subscription is None:
            self._subscription = subscribe(self.series, coordinator=self.coordinator)
        return self._subscription

    async def _version_of(self, step: int | None) -> WeightVersion:
        """Wait for this synchronisation's version of the step (None: any); return the newest.
        Raises VersionGone if this step's version is not kept, and DeadlineExceeded after WAIT_S."""
        subscription = self._subscribed()
        last = self._newer_than
        while True:
            version = await subscription.wait_async(last, WAIT_S)
            if step is None or version.step == step:
                return version
            kept = await asyncio.to_thread(subscription.versions)
            new = [each for each in kept if each.number > self._newer_than]
            of_step = [each for each in new if each.step == step]
            if of_step:
                return of_step[-1]
            if version.step > step:
                raise VersionGone(
                    f"the version of step {step} of {self.series} is not kept",
                    seen=f"version {version.number} of step {version.step}",
                )
            last = version.number
