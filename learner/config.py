"""Settings of the learner: the sections `[model]`, `[learner]` and `[sft]` of a recipe.

Validated without importing torch; what only the model on disk can tell is checked in `model`.
"""

import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from learner.cores import cores_of

ADVANTAGES = ("reinforce", "rloo", "grpo", "dr_grpo")
LOSSES = ("reinforce", "ppo", "grpo", "cispo")
CORRECTIONS = ("none", "tis")
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")

RATIO_LOSSES = frozenset({"ppo", "grpo", "cispo"})
"""Losses whose own ratio is to the behaviour policy when no proximal policy is recomputed."""

Dtype = Literal["float32", "bfloat16"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TinyModelConfig(_Section):
    """A Qwen3 with random weights and one token per character, built from scratch."""

    characters: str = Field(min_length=1)
    """Every character of the task; each becomes one token after <pad>, <eos>, <bos>."""
    hidden_size: int = Field(default=128, ge=8)
    layers: int = Field(default=3, ge=1)
    intermediate_size: int = Field(default=320, ge=8)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=8)
    initializer_range: float = Field(default=0.06, gt=0)
    """Standard deviation of the initial weights; tiny models learn far faster above 0.02."""
    context: int = Field(default=512, ge=16)
    """Longest sequence in tokens."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if len(set(self.characters)) != len(self.characters):
            raise ValueError("characters must not repeat")
        return self


class ModelConfig(_Section):
    """Where the initial weights come from: a folder or hub name, or `[model.tiny]`."""

    path: str | None = None
    """A local folder with config.json, safetensors and tokenizer, or a name on the hub."""
    tiny: TinyModelConfig | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError('give either path = "folder or hub name", or a [model.tiny] section')
        return self


class ScheduleConfig(_Section):
    """Learning rate over optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or a linear or cosine decay to `final_fraction`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0 to its full value."""
    decay_from: float = Field(default=0.0, ge=0, lt=1)
    """Share of all steps after which a linear or cosine decay begins."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Rate at the last step, as a fraction of the full rate."""


class OptimizerConfig(_Section):
    """AdamW for every parameter, or Muon for the matrices inside the layers."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of 2-D weights inside layers; the rest stays AdamW."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Full rate of AdamW."""
    muon_learning_rate: float = Field(default=0.02, gt=0)
    """Full rate of Muon; without effect under `adamw`."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Shares of the running means of gradient and squared gradient that a step keeps."""
    weight_decay: float = Field(default=0.0, ge=0)
    gradient_clipping: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: ScheduleConfig = ScheduleConfig()


class LearnerConfig(OptimizerConfig):
    """The learner group: parallelism, objective, optimizer, checkpoints."""

    ranks: int = Field(default=1, ge=1)
    """Learner processes, which share every batch."""
    zero_stage: int = Field(default=1, ge=0, le=3)
    """DeepSpeed ZeRO; shared out over ranks: 1 the optimizer's state, 2 gradients, 3 weights."""
    dtype: Dtype = "float32"
    """Of weights and activations; gradients and the optimizer's weights are float32 always."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers and compute their insides again in the backward pass."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and step there; needs zero_stage >= 1."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    cores: str | None = Field(default=None, pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")
    """CPU cores of all ranks together, as "1" or "2-5,8"; None leaves it to the system. Shared
    equally; where there are fewer cores than ranks, every rank uses them all."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of a rank; None takes the number of its cores, else 1."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each rank."""

    advantage: str = "grpo"
    """One of reinforce, rloo, grpo, dr_grpo, or "module:function"."""
    advantage_options: dict[str, Any] = {}
    loss: str = "cispo"
    """One of reinforce, ppo (= grpo), cispo, or "module:function"."""
    loss_options: dict[str, Any] = {}
    correction: str = "none"
    """Importance weights on top of the loss: none or tis, or "module:function"."""
    correction_options: dict[str, Any] = {}
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length"] = (
        "token_mean"
    )
    fixed_length: int | None = Field(default=None, ge=1)
    """Tokens that `fixed_length` divides every rollout by; None takes actors.max_new_tokens."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch and epoch; whole groups are split into as many parts."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch, each in another order."""
    recompute_proximal: bool | None = None
    """Compute log-probabilities with the weights at the start of each batch, the proximal policy;
    None: where a batch takes more than one optimizer step and the loss may have a ratio of its own
    (all but reinforce). The objective is then decoupled (Hilton et al. 2021, AReaL): the loss
    compares with the proximal policy, so that it limits the steps within the batch, and
    `correction` weighs by proximal / behaviour policy, for staleness and the engine. Without a
    correction nothing does, so max_staleness > 0 is refused. false: the ratio, of the loss or of
    the correction, is current / behaviour policy at every step."""
    microbatch_tokens: int = Field(default=2048, ge=16)
    """Capacity of one packed row in tokens; a longer sequence gets a row of its own."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Positions whose logits are held at once while log-probabilities are computed."""

    checkpoint_every: int = Field(default=50, ge=1)
    """Batches between checkpoints; the last version is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """So many of the newest checkpoints are always kept."""
    keep_checkpoint_hours: float = Field(default=0.0, ge=0)
    """Older ones are kept too while they are younger than this."""

    @field_validator("advantage", "loss", "correction")
    @classmethod
    def _known_or_dotted(cls, value: str, info: Any) -> str:
        known = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS}[
            info.field_name
        ]
        if value not in known and not all(value.partition(":")):
            allowed = ", ".join(known)
            close = difflib.get_close_matches(value, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f'{value!r} is not one of {allowed}, nor a dotted path "module:function"{hint}'
            )
        return value

    @model_validator(mode="after")
    def _cores_are_shared_equally(self) -> Self:
        if self.cores is None:
            return self
        count = len(cores_of(self.cores))
        if not count:
            raise ValueError(f"cores = {self.cores!r} is empty; a range begins with its first core")
        if count > self.ranks and count % self.ranks:
            raise ValueError(
                f"cores = {self.cores!r} are {count} cores, which ranks = {self.ranks} cannot "
                f"share equally; give a multiple of {self.ranks}, or fewer cores than ranks"
            )
        return self

    @model_validator(mode="after")
    def _counts_importance_once(self) -> Self:
        if self.loss in RATIO_LOSSES and self.correction != "none" and not self.uses_proximal:
            raise ValueError(
                f"loss {self.loss!r} already weighs by current/behaviour policy, so correction "
                f'{self.correction!r} would count it twice; use correction = "none", or loss = '
                '"reinforce", or recompute_proximal = true'
            )
        return self

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer = true needs zero_stage 1, 2 or 3, not 0: DeepSpeed offloads "
                "only what ZeRO manages"
            )
        if self.optimizer == "muon" and (self.zero_stage == 3 or self.offload_optimizer):
            raise ValueError(
                f'optimizer = "muon" with zero_stage = {self.zero_stage} and offload_optimizer = '
                f"{str(self.offload_optimizer).lower()}: it needs whole gradient matrices on the "
                "device; use zero_stage 0, 1 or 2 without offload_optimizer, or adamw"
            )
        _check_deepspeed(self, dtype=self.dtype, zero_stage=self.zero_stage)
        return self

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that a batch takes."""
        return self.minibatches * self.epochs

    @property
    def uses_proximal(self) -> bool:
        """Whether the proximal policy is computed at the start of each batch."""
        if self.recompute_proximal is None:
            return self.steps_per_batch > 1 and self._may_own_a_ratio
        return self.recompute_proximal

    @property
    def corrects_off_policyness(self) -> bool:
        """Whether the objective may account for rollouts sampled by another policy.

        A loss of the user's is believed to own a ratio; `update.corrects_off_policyness` loads it
        and knows.
        """
        return self.correction != "none" or (self._may_own_a_ratio and not self.uses_proximal)

    @property
    def _may_own_a_ratio(self) -> bool:
        return self.loss in RATIO_LOSSES or ":" in self.loss


def _check_deepspeed(config: OptimizerConfig, *, dtype: Dtype, zero_stage: int) -> None:
    """Refuses what DeepSpeed cannot do, or does otherwise than it says."""
    if dtype == "bfloat16" and zero_stage == 0:
        raise ValueError(
            'dtype = "bfloat16" needs zero_stage >= 1, not 0: only ZeRO keeps float32 gradients '
            "and weights beside them"
        )
    if config.optimizer == "muon" and zero_stage > 0 and config.gradient_clipping > 0:
        raise ValueError(
            f'optimizer = "muon" with zero_stage = {zero_stage} and gradient_clipping = '
            f"{config.gradient_clipping:g}: under ZeRO the orthogonalised update is clipped, not "
            "the gradient; use gradient_clipping = 0, or zero_stage = 0"
        )


class SftConfig(OptimizerConfig):
    """Supervised warm start on demonstrations: `headway sft RECIPE`."""

    demonstrations: str
    """A source of (prompt, completion) pairs: a JSONL file with the fields prompt and completion,
    or the name or dotted path of a prompt source that has worked examples."""
    options: dict[str, Any] = {}
    """Keywords of the source's `demonstrations`."""
    steps: int = Field(default=1000, ge=1)
    batch_tokens: int = Field(default=1024, ge=16)
    """Least tokens of one optimizer step, prompts included."""
    microbatch_tokens: int = Field(default=512, ge=16)
    """Capacity of one packed row in tokens."""
    zero_stage: int = Field(default=0, ge=0, le=2)
    dtype: Dtype = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    threads: int | None = Field(default=None, ge=1)
    logprob_chunk: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Self:
        _check_deepspeed(self, dtype=self.dtype, zero_stage=self.zero_stage)
        return self
