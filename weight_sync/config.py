"""Settings of weight synchronisation: the section `[weight_sync]` of a recipe."""

from pathlib import PurePath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WeightSyncConfig(BaseModel):
    """How a new policy version reaches the engines."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    transport: Literal["shared_memory", "object_store", "filesystem", "nccl", "ipc"] = (
        "shared_memory"
    )
    """How the bytes travel: `shared_memory` where learner and engines are on one node,
    `object_store` to any node of the cluster, `filesystem` through `folder`. Between GPUs, `nccl`;
    on one that learner and engines share, `ipc`: both write into the engine's own weights, which
    cannot be verified before, and engines stand still while weights travel."""
    folder: str | None = None
    """Shared folder of transport `filesystem`, seen by all nodes; for one run alone, and refused to
    others."""
    codec: Literal["full", "delta"] = "full"
    """What is sent: every tensor, whole; or the elements that changed since the version before,
    where the receiver has it and it is less. `delta` costs a copy of the weights in the memory of
    the learner and two in that of every actor, and saves only what crosses between nodes."""
    wire_dtype: Literal["as_trained", "bfloat16"] = "as_trained"
    """What tensors are cast to before they are sent. Engines that serve bfloat16 lose nothing by
    it; others then do not serve quite what is trained."""
    update_mode: Literal["in_flight", "between_requests"] = "in_flight"
    """Swap while requests are frozen half-way, or after the running ones have finished."""
    clear_cache: bool = False
    """Recompute the KV cache of frozen requests with the new weights instead of keeping it."""
    update_fraction: float = Field(default=0.25, gt=0, le=1)
    """Largest share of the engines that swaps at the same time; at least one always may. Without
    meaning for `nccl` and `ipc`, which bring a version to one engine after the other."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size of one piece of a version; a larger tensor gets a piece of its own. Without meaning for
    `nccl` and `ipc`, which have pieces of vLLM's."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """Deadline of staging, of a swap (pause, load and resume together) and of a publish; with
    `nccl` and `ipc`, of each engine that a version is brought to; also how long a swap permit
    outlives a holder that died. With `between_requests` the pause lasts as long as the longest
    running request, and this must exceed it."""

    @property
    def staged(self) -> bool:
        """Whether receivers verify a version before their engine is touched."""
        return self.transport not in ("nccl", "ipc")

    @property
    def one_node(self) -> bool:
        """Whether weights cannot leave the learner's node."""
        return self.transport in ("shared_memory", "ipc")

    @model_validator(mode="after")
    def _direct_transports_send_all(self) -> "WeightSyncConfig":
        if not self.staged and self.codec != "full":
            raise ValueError(
                f"codec is {self.codec!r} and transport is {self.transport!r}, which writes all "
                'weights into the engine; set codec = "full", or transport to "shared_memory", '
                '"object_store" or "filesystem"'
            )
        return self

    @model_validator(mode="after")
    def _folder_where_it_is_used(self) -> "WeightSyncConfig":
        if self.folder is not None and not PurePath(self.folder).is_absolute():
            raise ValueError(f"folder is {self.folder!r}; expected an absolute path")
        if (self.folder is None) == (self.transport == "filesystem"):
            raise ValueError(
                f"transport is {self.transport!r} and folder is {self.folder!r}; "
                'transport "filesystem" needs a folder, and nothing else uses one'
            )
        return self
