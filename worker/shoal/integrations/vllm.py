"""Weight transfer engine for vLLM, which installs versions of a series.

Enabled by `--weight-transfer-config '{"backend": "shoal"}'`, and found by the plug-in entry point
`vllm.general_plugins`. If one worker cannot stage and verify a version, none installs it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import layerwise

from shoal.weights.script import publish, subscribe
from shoal.weights.subscription import Subscription, Weights
from shoal.weights.version import WeightVersion
from shoal_client.connection.coordinators import chance
from shoal_proto.back_off import BackOff
from shoal_proto.errors import InvalidSpec, PublicationAbandoned

log = structlog.get_logger(__name__)

BACKEND = "shoal"
COMMIT_S = 600.0
FIRST_PAUSE_S = 1.0
"""Pause of `follow` after a failed installation, doubled up to LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 60.0


def register() -> None:
    """Register the backend: the plug-in's entry point. May be called again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "ShoalWeightTransferEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, __name__, "ShoalTrainerEngine")


@dataclass
class ShoalInitInfo(WeightTransferInitInfo):
    """Settings of the series that an engine follows."""

    series: str
    """JOB/NAME."""
    coordinator: str | None = None
    """Coordinators' host:port, separated by commas; None: SHOAL_COORDINATOR."""
    reader: str | None = None
    """Name in `shoal status`, followed by the rank and a suffix; None: a generated name."""


@dataclass
class ShoalUpdateInfo(WeightTransferUpdateInfo):
    """Selection of the version to install."""

    version: int | None = None
    """None: the newest version."""


Load = Callable[[], Iterable[tuple[str, Tensor]]]


class ShoalWeightTransferEngine(WeightTransferEngine):
    """A vLLM worker's reader of a series."""

    init_info_cls = ShoalInitInfo
    update_info_cls = ShoalUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._subscription: Subscription | None = None
        self._outline: dict[str, torch.Size] | None = None
        """Names and shapes of the checkpoint that vLLM was started with."""
        self._serves: Load = self._from_checkpoint
        """Returns the weights that vLLM serves, to load them again after a failed update."""

    def init_transfer_engine(self, init_info: ShoalInitInfo) -> None:
        if self._subscription is not None:
            self._subscription.close()
        reader = init_info.reader and f"{init_info.reader}-{self.parallel_config.rank}"
        self._subscription = subscribe(
            init_info.series, coordinator=init_info.coordinator, reader=reader
        )

    def start_weight_update(self) -> None:
        """Do nothing: layers change once a whole version is staged."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method then synchronises a device, which fails on a CPU.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShoalUpdateInfo) -> None:
        """Install a version on every worker, or on none.

        If a worker cannot stage the version, the others raise PublicationAbandoned. If a worker
        cannot load it, all load the previous version again and raise PublicationAbandoned.
        """
        staged = self._staged(update_info.version)
        number = lowest(staged.version.number)
        if not all_true(staged.version.number == number):
            # The newest version of one worker was not that of another.
            staged = self._staged(number)
        failure: Exception | None = None
        try:
            self._load(staged.items)
        except Exception as error:  # noqa: BLE001 - raised below, once the engine serves again
            failure = error
        if not all_true(failure is None):
            log.error("version_not_loaded", version=staged.version.number, reason=str(failure))
            _forget_load(self.model)
            self._load(self._serves)
            raise PublicationAbandoned(
                f"vLLM could not load version {staged.version.number}; it serves the previous one",
                seen=repr(failure) if failure is not None else "an error of another worker",
                expected="tensors with the names and shapes of the model that it serves",
            ) from failure
        self._serves = staged.items
        self._followed().installed(staged)

    def _staged(self, number: int | None) -> Weights:
        failure: Exception | None = None
        try:
            found = self._followed().fetch("newest" if number is None else number)
            self._followed().check_newer(found.version)
            self._check_whole(found)
        except Exception as error:  # noqa: BLE001 - raised below, once all workers know of it
            failure = error
        if not all_true(failure is None):
            raise failure or PublicationAbandoned(
                "another worker of this engine could not stage the version; none installs it"
            )
        return found

    def _check_whole(self, weights: Weights) -> None:
        """Raise InvalidSpec for a version of another model, or of a part of this one.

        With a part of the model, vLLM would serve old and new values together.
        """
        if self._outline is None:
            self._outline = {name: tensor.shape for name, tensor in self._serves()}
        for name, shape in self._outline.items():
            if name in weights and weights[name].shape != shape:
                raise InvalidSpec(
                    f"version {weights.version.number} is of another model: {name}",
                    seen=str(tuple(weights[name].shape)),
                    expected=str(tuple(shape)),
                )
        wanted = sum(shape.numel() for shape in self._outline.values())
        # A tied tensor has several names, and vLLM's checkpoint of the model perhaps one.
        once = {id(tensor): tensor for tensor in weights.values()}
        if (found := sum(tensor.numel() for tensor in once.values())) < wanted:
            missing = sorted(self._outline.keys() - weights.keys())
            raise InvalidSpec(
                f"version {weights.version.number} is not the whole model",
                seen=f"{found:,} elements; without {', '.join(missing[:3])}",
                expected=f"{wanted:,}, as the model that vLLM was started with",
            )

    def _followed(self) -> Subscription:
        if self._subscription is None:
            raise InvalidSpec(
                "vLLM has no series to follow",
                expected='init_weight_transfer_engine({"series": "JOB/NAME"}) first',
            )
        return self._subscription

    def finish_weight_update(self) -> None:
        """Do nothing: the whole version is installed."""

    def _load(self, weights: Load) -> None:
        # Layer by layer, from weights that are all staged.
        layerwise.initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights()))
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _from_checkpoint(self) -> Iterable[tuple[str, Tensor]]:
        loader: Any = get_model_loader(self.vllm_config.load_config)
        found: Iterable[tuple[str, Tensor]] = loader.get_all_weights(self.model_config, self.model)
        return found

    def shutdown(self) -> None:
        if self._subscription is not None:
            self._subscription.close()


def _forget_load(model: nn.Module) -> None:
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


def all_true(own: bool) -> bool:
    """True if `own` is true on all workers. Collective."""
    return bool(lowest(int(own)))


def lowest(own: int) -> int:
    """Return the lowest `own` of all workers. Collective."""
    group = get_world_group()
    if group.world_size == 1:
        return own
    number = torch.tensor([own])
    dist.all_reduce(number, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return int(number.item())


# --- trainers that use vLLM's own classes ---


@dataclass
class ShoalTrainerInit(TrainerInitInfo):
    """Settings for `WeightTransferTrainerFactory.trainer_init`: a series, and options of
    `shoal.publish`."""

    backend: ClassVar[str] = BACKEND
    series: str = ""
    coordinator: str | None = None
    keep: int = 2
    copies: int = 2


class ShoalTrainerEngine(TrainerWeightTransferEngine):
    """Publishes a `WeightSource`, and makes an engine install it."""

    init_info_cls = ShoalTrainerInit

    def __init__(
        self,
        init_info: ShoalTrainerInit,
        client: VLLMWeightSyncClient,
        source: WeightSource | None,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._settings = init_info

    @classmethod
    def trainer_init(
        cls,
        init_info: ShoalTrainerInit,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> "ShoalTrainerEngine":
        engine = cls(init_info, client, source)
        if engine.is_sender:
            given = {"series": init_info.series, "coordinator": init_info.coordinator}
            client.init_weight_transfer_engine(given)
        return engine

    def send_weights(self) -> None:
        """Publish the source's weights, and return once the engine serves them.

        Raises InvalidSpec without a source, and DeadlineExceeded if the version is not committed
        within COMMIT_S.
        """
        if self.source is None:
            raise InvalidSpec("there is nothing to publish", expected="source=ModuleSource(model)")
        weights = {name: tensor.detach() for name, tensor in self.source}
        if not self.is_sender:
            return
        own = self._settings
        ticket = publish(
            own.series, weights, coordinator=own.coordinator, keep=own.keep, copies=own.copies
        )
        version = ticket.wait("committed", timeout=COMMIT_S)
        assert version is not None, "a committed ticket has a version"
        install(self.client, version)

    def shutdown(self) -> None:
        """Do nothing: the series is released when the process ends."""


# --- engines that follow a series by themselves ---


def install(client: VLLMWeightSyncClient, version: WeightVersion | int) -> None:
    """Make an engine install a version, and label its outputs with the number."""
    number = version if isinstance(version, int) else version.number
    client.start_weight_update()
    client.update_weights({"version": number})
    client.finish_weight_update(str(number))


def follow(
    client: VLLMWeightSyncClient,
    series: str,
    *,
    coordinator: str | None = None,
    until: Callable[[WeightVersion], bool] = lambda version: False,
) -> None:
    """Make an engine install each newest version, until `until(version)` is True. Versions
    published during an installation are skipped, except the newest.

    If an installation fails, the error is logged, and the newest version is installed after a pause
    of up to LONGEST_PAUSE_S. If `until(version)` is True for the failed version, the error is
    raised.
    """
    given = {"series": series, "coordinator": coordinator}
    client.init_weight_transfer_engine(given)
    with subscribe(series, coordinator=coordinator) as subscription:
        installed, has_failed = 0, False
        back_off = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            version = subscription.wait(installed)
            try:
                if has_failed:
                    # The engine may have been restarted.
                    client.init_weight_transfer_engine(given)
                # The engine's workers begin to fetch later, perhaps after further versions.
                with subscription.leased(version):
                    install(client, version)
            except Exception as error:
                if until(version):
                    raise
                has_failed = True
                log.error("version_not_installed", version=version.number, reason=str(error))
                time.sleep(back_off.pause_s(chance()))
                continue
            installed, has_failed = version.number, False
            back_off.reset()
            if until(version):
                return
