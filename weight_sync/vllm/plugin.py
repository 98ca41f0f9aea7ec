"""Loads verified buckets inside vLLM's own worker process (weight-transfer backend "headway").

vLLM finds `register` through the entry point group `vllm.general_plugins`. The worker hands
zero-copy tensors of verified memory to the model's own loader. For models that allow a `Shadow`, a
thread does so while the engine generates, and the pause covers only the exchange, on a GPU a copy.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import LoadConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise

from weight_sync.adapter import merged, touched
from weight_sync.base_model import base_folder
from weight_sync.errors import LoadFailed
from weight_sync.manifest import Manifest
from weight_sync.receive.staging import tensor_views
from weight_sync.transports.sealed_memory import map_verified
from weight_sync.vllm.device_memory import DeviceMemory
from weight_sync.vllm.shadow import Shadow, applies, incomplete
from weight_sync.vllm.transfer import BACKEND

logger = logging.getLogger(__name__)

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="prepare-weights")


@dataclass
class StagingInfo(WeightTransferInitInfo):
    """Facts of the recipe that an engine's worker needs of its device."""

    shared: bool = False
    """True if other processes compute on its GPU."""


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """The manifest of one version, as JSON with locations that are valid on this node."""

    manifest: str = ""


class StagedWeightsEngine(WeightTransferEngine[StagingInfo, ManifestInfo]):
    """Replaces all weights of the model from memory of this node, for adapters with its folder."""

    init_info_cls = StagingInfo
    update_info_cls = ManifestInfo
    _preparation: tuple[Manifest, Future[Shadow | None]] | None = None
    """The version that `_THREAD` loads beside the served one, or has loaded."""
    _served: Manifest | None = None
    """The version that is served; None if none was loaded, or perhaps not whole."""
    _received: Manifest | None = None
    prepare_seconds = 0.0
    """Time that the newest finished preparation took, above 0."""
    memory: DeviceMemory | None = None
    """Staging for weights that must keep their addresses; None exchanges references."""

    def init_transfer_engine(self, init_info: StagingInfo) -> None:
        """Choose how weights are exchanged: there is no connection."""
        self._tied: list[Any] = []
        if self.device.type != "cpu":
            self.memory = DeviceMemory(self.device, shared=init_info.shared)

    def prepare(self, manifest: Manifest) -> bool:
        """Begin to load a version beside the served one; False if only a pause can load it."""
        if not applies(self.model):
            return False
        self._discard()
        # Layers without factors keep the model folder's weights, as the last adapter left them.
        factors = _factors(manifest)
        whole = factors is None or factors != _factors(self._served)
        self._preparation = manifest, _THREAD.submit(self._prepare, manifest, whole)
        return True

    def prepared(self) -> bool:
        """Return True if `exchange` would not have to wait."""
        return self._preparation is None or self._preparation[1].done()

    def exchange(self, version: int) -> bool:
        """Replace the served version by the prepared one; False if it was not prepared."""
        if self._preparation is None or not self.prepared():
            return False
        manifest, preparing = self._preparation
        if manifest.version != version or (shadow := preparing.result()) is None:
            return False
        shadow.exchange()
        self._served = manifest
        self._discard()
        return True

    def _prepare(self, manifest: Manifest, whole: bool) -> Shadow | None:
        """Load a version, whose buckets must stay open meanwhile; None if loading failed."""
        shadow, begin = Shadow(self.model, self.memory), time.perf_counter()
        try:
            shadow.load(self._weights(manifest, whole), whole=whole)
        except Exception as error:  # noqa: BLE001  (the load in the pause raises it, typed)
            logger.warning("version %d cannot be prepared: %s", manifest.version, error)
            shadow.close()
            return None
        finally:
            self.prepare_seconds = time.perf_counter() - begin
        return shadow

    def _weights(
        self, manifest: Manifest, whole: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights of a version, or those of layers that an adapter may change.

        An adapter is merged into the model folder's, which are read anew, so that what rounding
        takes never adds up, from mapped files, whose pages engines of a node share.
        """
        memories = [map_verified(bucket) for bucket in manifest.buckets]
        tensors = tensor_views(manifest.tensors, memories)
        if manifest.adapter is None:
            return tensors
        config = copy(self.model_config)
        config.model = str(base_folder(config.model, manifest.adapter.base))
        # "auto" would prefer the names of Mistral's own format.
        loader = DefaultModelLoader(LoadConfig(load_format="safetensors", use_tqdm_on_load=False))
        base, factors = loader.get_all_weights(config, self.model), dict(tensors)
        if not whole:
            base = filter(touched(factors), base)
        return merged(base, factors, manifest.adapter.scale)

    def _discard(self) -> None:
        """Free the prepared or the replaced weights, before the next version is loaded."""
        if self._preparation is not None:
            _THREAD.submit(_free, self._preparation[1])
            self._preparation = None

    def start_weight_update(self) -> None:
        """Make every layer ready for loading and discard the remains of a failed update."""
        self._discard()
        self._served = self._received = None
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a version; unlike the base class, wait for an accelerator only if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ManifestInfo) -> None:
        """Map the buckets and load every tensor.

        Raises StagingError if a bucket is gone, LoadFailed if a layer was not loaded whole.
        """
        manifest = Manifest.from_json(update_info.manifest)
        self.model.load_weights(self._weights(manifest))
        incompletes = [name for name, layer in self.model.named_modules() if incomplete(layer)]
        self._tied, without = _layers_without_weights(self.model)
        if skipped := incompletes + without:
            raise LoadFailed(
                f"version {manifest.version} has not all weights for {len(skipped)} layers "
                f"({', '.join(skipped[:3])})"
            )
        self._received = manifest

    def finish_weight_update(self) -> None:
        """Process the layers that wait for the end of the update."""
        before = layerwise.logger.level
        layerwise.logger.setLevel(logging.ERROR)  # it warns of every tied or weightless layer
        try:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        finally:
            layerwise.logger.setLevel(before)
        if self.device.type == "cpu":  # vLLM's packed copy of a tied weight is still the old one
            for layer in self._tied:
                layer.quant_method.process_weights_after_loading(layer)
            _pack_experts(self.model)
        self._served = self._received

    def shutdown(self) -> None:
        """Free the prepared weights; nothing else is held between updates."""
        self._discard()


def _factors(manifest: Manifest | None) -> set[tuple[str, str]] | None:
    """Return names and dtypes of an adapter's factors; None for whole weights or nothing."""
    if manifest is None or manifest.adapter is None:
        return None
    return {(spec.name, spec.dtype) for spec in manifest.tensors}


def _free(preparation: Future[Shadow | None]) -> None:
    if shadow := preparation.result():
        shadow.close()


class PreparesWeights:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    weight_transfer_engine: StagedWeightsEngine
    _weight_update_active: bool

    def abandon_weight_update(self) -> bool:
        """Let a load that failed on any worker be followed by another one.

        vLLM's worker would refuse it after `finish_weight_update` or another worker failed.
        """
        self._weight_update_active = False
        return True

    def prepare_weights(self, manifest: str) -> bool:
        """Begin to load a version beside the served one (`StagedWeightsEngine.prepare`)."""
        return self.weight_transfer_engine.prepare(Manifest.from_json(manifest))

    def weights_prepared(self) -> float:
        """Return the seconds that preparing took, or 0 if `exchange_weights` would have to wait."""
        engine = self.weight_transfer_engine
        return engine.prepare_seconds if engine.prepared() else 0.0

    def exchange_weights(self, version: int) -> bool:
        """Replace the served version by the prepared one (`StagedWeightsEngine.exchange`)."""
        return self.weight_transfer_engine.exchange(version)


def _layers_without_weights(model: torch.nn.Module) -> tuple[list[Any], list[str]]:
    """Return the layers of which nothing was loaded: the tied ones, and names of the others."""
    updated = {id(parameter) for parameter in model.parameters()}
    untouched: list[tuple[str, torch.nn.Module, set[int]]] = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or layerwise.is_deferred_attention_layer(layer):
            continue
        parameters = {id(parameter) for parameter in info.kernel_tensors[0].values()}
        if info.load_numel:
            updated |= parameters
        elif parameters:
            untouched.append((name, layer, parameters))
    tied = [layer for _, layer, parameters in untouched if parameters <= updated]
    return tied, [name for name, _, parameters in untouched if not parameters <= updated]


def _pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts, which vLLM does on CPUs only for the first load."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def register() -> None:
    """Register the backend with vLLM in this process; harmless to call twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, StagedWeightsEngine.__name__)
    if torch.cpu._is_amx_tile_supported():
        # vLLM's attention in bfloat16 uses tiles without asking the kernel for them.
        torch.cpu._init_amx()
