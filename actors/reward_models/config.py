"""Settings of the actor that serves reward models: the section `[actors.reward_model]`.

Imports no torch. What needs the folders is checked when the run starts.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from actors.engines.cpu_affinity import Cores


class RewardModelConfig(BaseModel):
    """Reward models behind the reward `reward_model`: all in one process, asked in batches."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    paths: tuple[str, ...] = ()
    """Model folders or hub names of sequence classifiers with one label; empty takes what `headway
    reward-model` made from the same recipe."""
    combine: Literal["min", "mean", "uwo"] = "min"
    """How the scores of several models become one: the smallest, their mean, or their mean less
    `uncertainty` times their variance (Coste et al. 2023)."""
    uncertainty: float = Field(default=0.5, ge=0)
    """λ: what a unit of variance between the models costs under `uwo`."""
    standardise: bool = True
    """Give each model's scores mean 0 and standard deviation 1 on the held-out pairs, the same for
    all, as its folder says: their scales differ by chance."""
    batch_size: int = Field(default=32, ge=1)
    """Most texts of one padded batch."""
    max_wait_ms: float = Field(default=5.0, ge=0)
    """Longest that a text waits for others to share its batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the models compute in; in bfloat16 a score depends on its batch by rounding."""
    cores: Cores | None = None
    """CPU cores, as "1" or "2-5,8"; torch uses as many threads. None: one thread anywhere."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs that Ray reserves; 0 computes on the CPU."""
