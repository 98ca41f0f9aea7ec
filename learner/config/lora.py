"""Settings of adapters: the sections `lora` of learner, critic, warm start and reward model."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from learner.config.optimizer import OptimizerConfig, Section


class LoraConfig(Section):
    """Low-rank adapters (LoRA): linear layers W stay as they are, and W + scale · B A is used.

    Only the factors A [rank, in] and B [out, rank] have gradients and optimizer state, are in
    checkpoints, and travel to the engines. A is random and B is 0 at first.
    """

    rank: int = Field(default=16, ge=1)
    """Rank of the change of a layer."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is alpha / rank."""
    rslora: bool = False
    """The scale is alpha / √rank (rank-stabilised LoRA)."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers that get factors: every linear layer but the head, or the last parts of the names of
    some, such as ["q_proj", "v_proj"]. Experts that are held as one tensor get none."""
    path: str | None = None
    """Folder of an adapter to begin with, as PEFT writes it, of the same rank, alpha and targets.
    None begins with the model as it is. The reference of a KL penalty has no adapter either way."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return path and str(Path(path).expanduser().absolute())

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def check_lora(lora: LoraConfig | None, optimizer: OptimizerConfig) -> None:
    """Refuse an optimizer that is not meant for factors.

    Raises:
        ValueError: It is Muon.
    """
    if lora is not None and optimizer.optimizer == "muon":
        raise ValueError(
            'optimizer = "muon" with a section [lora]: it orthogonalises updates of whole matrices,'
            " and an adapter trains their factors; use adamw"
        )
