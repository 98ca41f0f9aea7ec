"""Settings of weight synchronisation: the section `[weight_sync]` of a recipe."""

from pathlib import PurePath
from typing import Literal

from pydantic import Field, model_validator

from headway.recipe_section import MAY_CHANGE, Section
from weight_sync.probe import Probing


class WeightSyncConfig(Section):
    """Section `[weight_sync]`: the way of a new policy version to the engines."""

    on_resume = MAY_CHANGE

    transport: Literal["shared_memory", "object_store", "filesystem", "nccl", "ipc"] = (
        "shared_memory"
    )
    """Transport of weights: `shared_memory` on one node, `object_store` to any node of the cluster,
    `filesystem` through `folder`, `nccl` between GPUs, `ipc` on a GPU that learner and engines
    share. `nccl` and `ipc` write into the engine's own weights, without verification before, and
    engines stand still meanwhile."""
    folder: str | None = None
    """Folder of transport `filesystem`, visible to all nodes and reserved for one run."""
    codec: Literal["full", "delta"] = "full"
    """Content that is sent: all tensors, or with `delta` the elements that changed since the last
    version, if the receiver has it and the delta is smaller. `delta` costs one copy of the weights
    in the learner's memory and two in every actor's, and saves only traffic between nodes."""
    wire_dtype: Literal["as_trained", "bfloat16"] = "as_trained"
    """Dtype that tensors are cast to before they are sent. `bfloat16` changes nothing for engines
    that serve bfloat16, and rounds the weights for all others."""
    update_mode: Literal["in_flight", "between_requests"] = "in_flight"
    """Swap while requests are frozen half-way, or after the running requests have finished."""
    clear_cache: bool = False
    """Recompute the KV cache of frozen requests with the new weights instead of keeping it."""
    update_fraction: float = Field(default=0.25, gt=0, le=1)
    """Largest share of the engines that swap at the same time, at least one engine. Ignored by
    `nccl`, which updates all engines at once, and `ipc`, which updates one after the other."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size of a bucket, the unit of transfer; a larger tensor gets a bucket of its own. Ignored by
    `nccl` and `ipc`, which use vLLM's own chunks."""
    probe: Probing = "auto"
    """Versions that each engine is compared with the learner by: it scores a few fixed tokens after
    its swap, and the learner those of the same version. `auto` is every one, or so few that probes
    take 0.5 % of the time."""
    on_drift: Literal["alert", "resend", "restart"] = "alert"
    """Response to an engine that drifts: its log-probabilities differ more from the learner's than
    those of the other engines, or than `probe` allows. `alert` names it: on the terminal, in
    drift.jsonl and by a metric. `resend` also sends it the newest version again, whole. `restart`
    does that first, and restarts its actor if it still drifts; with `nccl` and `ipc`, which send
    every version whole, at once."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest time without progress of a publication, of staging and, with `nccl` and `ipc`, of an
    update; deadline of preparing and of a swap (pause, load and resume together), and lifetime of a
    swap permit whose holder died. Each has in addition the time that its bytes take at 25 MB/s, in
    a swap at 250 MB/s, so it need not grow with the model. With `between_requests` it must exceed
    the longest running request, for which the pause waits."""

    @property
    def staged(self) -> bool:
        """True if receivers verify a version before their engine is touched."""
        return self.transport not in ("nccl", "ipc")

    @property
    def one_node(self) -> bool:
        """True if weights cannot leave the learner's node."""
        return self.transport in ("shared_memory", "ipc")

    @model_validator(mode="after")
    def _transport_fits(self) -> "WeightSyncConfig":
        if not self.staged and self.codec != "full":
            raise ValueError(
                f"codec is {self.codec!r} and transport is {self.transport!r}, which writes all "
                'weights into the engine; set codec = "full", or transport to "shared_memory", '
                '"object_store" or "filesystem"'
            )
        if not self.staged and self.on_drift == "resend":
            raise ValueError(
                f'on_drift is "resend" and transport is {self.transport!r}, which sends every '
                'version whole already; set on_drift to "alert" or "restart"'
            )
        if self.folder is not None and not PurePath(self.folder).is_absolute():
            raise ValueError(f"folder is {self.folder!r}; expected an absolute path")
        if (self.folder is None) == (self.transport == "filesystem"):
            raise ValueError(
                f"transport is {self.transport!r} and folder is {self.folder!r}; "
                'transport "filesystem" needs a folder, and nothing else uses one'
            )
        return self
