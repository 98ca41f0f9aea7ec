"""Settings of supervised training: the sections `[sft]` and `[reward_model]` of a recipe."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from learner.config.lora import LoraConfig
from learner.config.optimizer import Dtype, OptimizerConfig, check_deepspeed


class SupervisedConfig(OptimizerConfig):
    """Settings that warm start and reward-model training have in common."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of what is trained; None takes the run's. Recipes with one name share it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the source's `demonstrations` or `preferences`; of a data set split, config and
    revision."""
    muon_learning_rate: float | None = Field(default=0.02, gt=0)
    """Full rate of Muon; without effect under `adamw`."""
    zero_stage: int = Field(default=0, ge=0, le=2)
    """DeepSpeed ZeRO, as learner.zero_stage."""
    dtype: Dtype = "float32"
    """Dtype of weights and activations, as learner.dtype; `auto` looks at the model that it begins
    with, and not at actors.dtype."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention in transformers, as learner.attention."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; None takes as many as a rank of the learner has in a run on this machine."""
    lora: LoraConfig | None = None
    """An adapter, which is trained in place of the weights and merged into the model at the end."""

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Self:
        adapted = self.lora is not None
        check_deepspeed(self, dtype=self.dtype, zero_stage=self.zero_stage, adapted=adapted)
        return self


class SftConfig(SupervisedConfig):
    """Supervised warm start on demonstrations: `headway sft RECIPE`."""

    demonstrations: str
    """Pairs with the fields prompt and completion, or conversations with the field messages: a
    JSONL, CSV, Parquet or Arrow file, `datasets:NAME`, or the name or dotted path of a prompt
    source that has worked examples."""
    steps: int = Field(default=1000, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(default=1024, ge=16)
    """Smallest number of tokens of one optimizer step, prompts included."""
    microbatch_tokens: int = Field(default=512, ge=16)
    """Capacity of one microbatch in tokens."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Positions whose logits are held at once."""


class RewardTrainingConfig(SupervisedConfig):
    """Reward models from preference pairs: `headway reward-model RECIPE`."""

    pairs: str
    """(prompt, chosen, rejected) triples: a JSONL, CSV, Parquet or Arrow file with these fields,
    `datasets:NAME`, or the name or dotted path of a prompt source that has preferences."""
    path: str | None = None
    """A model folder or hub name to begin with; None takes the recipe's model, or its warm start
    where there is one."""
    members: int = Field(default=1, ge=1)
    """Models to train, one after the other: each with a head and an order of pairs of its own."""
    steps: int = Field(default=500, ge=1)
    """Optimizer steps of each model."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs of one optimizer step."""
    microbatch_tokens: int = Field(default=2048, ge=16)
    """Capacity of one microbatch in tokens; a longer pair gets one of its own."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Full rate of AdamW."""
    centring: float = Field(default=0.01, ge=0)
    """Weight of (s_w + s_l)² in the loss, which keeps scores around 0."""
    margin: float = Field(default=0.0, ge=0)
    """By how much the better score should exceed the worse one."""
    heldout_pairs: int = Field(default=256, ge=1)
    """Pairs that are never trained; accuracy is measured on them."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers and compute their insides again in the backward pass."""
