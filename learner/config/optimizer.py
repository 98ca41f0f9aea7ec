"""Settings of optimizers, shared by policy, critic, reward model and warm start."""

from typing import Annotated, Literal

from pydantic import Field

from headway.recipe_section import Resumable, ResumeRule, Section

Dtype = Literal["float32", "bfloat16", "auto"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(Section):
    """Learning rate over optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or a linear or cosine decay to `final_fraction`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0 to its full value."""
    decay_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of all steps after which a linear or cosine decay begins."""
    final_fraction: float | None = Field(default=None, ge=0, le=1)
    """Rate at the last step, as a fraction of the full rate. None decays towards 0, which would be
    reached one step after the last, so that no step is without effect."""


class OptimizerConfig(Section):
    """AdamW for every parameter, or Muon for the matrices inside the layers."""

    on_resume = ResumeRule("it is a constant of the optimizer whose state its checkpoints have")

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of 2-D weights inside layers; the rest stays AdamW."""
    learning_rate: Resumable[float] = Field(default=1e-6, gt=0)
    """Full rate of AdamW."""
    muon_learning_rate: Resumable[float | None] = Field(default=None, gt=0)
    """Full rate of Muon, which needs it; without effect under `adamw`."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Shares of the running means of gradient and squared gradient that a step keeps."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to AdamW's root of the mean squared gradient. Parameters with gradients far below it
    hardly move; MiniMax-M1 and ScaleRL use 1e-15."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of the optimizer."""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: `matrices` leaves norms, biases and embeddings out."""
    gradient_clipping: Resumable[float] = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Resumable[ScheduleConfig] = ScheduleConfig()


def check_deepspeed(
    config: OptimizerConfig,
    *,
    dtype: str,
    zero_stage: int,
    adapted: bool,
    offload: bool = False,
    where: str = "",
) -> None:
    """Refuse combinations that DeepSpeed cannot compute, or computes differently.

    `where` is the prefix of the optimizer's settings in the section, such as "critic."; `adapted`:
    the factors of an adapter are trained.

    Raises:
        ValueError: A combination that is not supported.
    """
    if config.optimizer == "muon" and adapted:
        raise ValueError(
            f'{where}optimizer = "muon" with a section [{where}lora]: it orthogonalises updates of '
            "whole matrices, and an adapter trains their factors; use adamw"
        )
    if dtype == "bfloat16" and zero_stage == 0:
        raise ValueError(
            'dtype = "bfloat16" needs zero_stage >= 1, not 0: only ZeRO keeps float32 gradients '
            "and weights beside them"
        )
    if config.optimizer == "muon" and (zero_stage == 3 or offload):
        raise ValueError(
            f'{where}optimizer = "muon" with zero_stage = {zero_stage} and offload_optimizer = '
            f"{str(offload).lower()}: it needs whole gradient matrices on the device; use "
            "zero_stage 0, 1 or 2 without offload_optimizer, or adamw"
        )
    if config.optimizer == "muon" and zero_stage > 0 and config.gradient_clipping > 0:
        raise ValueError(
            f'{where}optimizer = "muon" with zero_stage = {zero_stage} and {where}gradient_clipping'
            f" = {config.gradient_clipping:g}: under ZeRO the orthogonalised update is clipped, "
            f"not the gradient; use {where}gradient_clipping = 0, or zero_stage = 0"
        )
    if config.optimizer == "muon" and config.muon_learning_rate is None:
        raise ValueError(
            f'{where}optimizer = "muon" needs {where}muon_learning_rate, which has no default: the '
            "0.02 of warm starts is a rate for training from scratch"
        )
