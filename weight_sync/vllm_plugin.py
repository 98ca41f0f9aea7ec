"""Loads verified buckets inside vLLM's own worker process (weight-transfer backend "headway").

The only file of the package that imports vLLM, which finds `register` through the entry point
group `vllm.general_plugins`. The worker maps the memory that the receiver has verified and hands
zero-copy tensors to the model's own loader, fused projections included. Checks here are the last
line: names, shapes and checksums were compared before the engine was paused.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import layerwise

from weight_sync.errors import LoadFailed
from weight_sync.manifest import Manifest
from weight_sync.staging import tensor_views
from weight_sync.transports.shared_memory import map_verified

BACKEND = "headway"


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing needs to be agreed on beforehand."""


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """One version, as JSON with locations that are valid on this node."""

    manifest: str = ""


class StagedWeightsEngine(WeightTransferEngine[NoInitInfo, ManifestInfo]):
    """Replaces all weights of the model from memory of this node."""

    init_info_cls = NoInitInfo
    update_info_cls = ManifestInfo

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Nothing to connect to."""
        self._tied: list[Any] = []

    def start_weight_update(self) -> None:
        """Makes every layer ready for loading, and forgets what a failed update left behind."""
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        layerwise.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a version; unlike the base class, waits for an accelerator only if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ManifestInfo) -> None:
        """Maps the buckets and loads every tensor.

        Raises:
            StagingError: A bucket is gone; nothing was loaded.
            LoadFailed: A layer got no weights at all, and would have kept the old ones.
        """
        manifest = Manifest.from_json(update_info.manifest)
        memories = [map_verified(bucket) for bucket in manifest.buckets]
        self.model.load_weights(tensor_views(manifest.tensors, memories))
        self._tied, skipped = _layers_without_weights(self.model)
        if skipped:
            raise LoadFailed(
                f"version {manifest.version} has no weights for {len(skipped)} layers "
                f"({', '.join(skipped[:3])})"
            )

    def finish_weight_update(self) -> None:
        """Processes the layers that wait for the end of the update."""
        before = layerwise.logger.level
        layerwise.logger.setLevel(logging.ERROR)  # it warns of every tied or weightless layer
        try:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
        finally:
            layerwise.logger.setLevel(before)
        if self.device.type == "cpu":  # vLLM's packed copy of a tied weight is still the old one
            for layer in self._tied:
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _layers_without_weights(model: torch.nn.Module) -> tuple[list[Any], list[str]]:
    """Layers of which not one element was loaded: the tied ones, and the names of the others."""
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


def register() -> None:
    """Makes the backend known to vLLM in this process; harmless to call twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, StagedWeightsEngine.__name__)
