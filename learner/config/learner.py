"""Settings of the learner: the sections `[model]` and `[learner]` of a recipe.

Validated without importing torch; `learner.model` checks what depends on the model on disk.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.cpu_cores import Cores, parse_cores
from headway.recipe_section import MAY_CHANGE, Section
from learner.config.lora import ADAPTED, LoraConfig
from learner.config.objective import ObjectiveConfig
from learner.config.objective_rules import check_traits
from learner.config.optimizer import Dtype, OptimizerConfig, check_deepspeed


class TinyModelConfig(Section):
    """A Qwen3 with random weights and one token per character, built from scratch."""

    characters: str = Field(min_length=1)
    """Every character of the task; each becomes one token after <pad>, <eos>, <bos>."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the model."""
    layers: int = Field(default=3, ge=1)
    """Number of transformer blocks."""
    intermediate_size: int = Field(default=320, ge=8)
    """Width of the feed-forward layers."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; a multiple of kv_heads."""
    kv_heads: int = Field(default=2, ge=1)
    """Heads of keys and values."""
    head_dim: int = Field(default=32, ge=8)
    """Width of one attention head."""
    initializer_range: float = Field(default=0.06, gt=0)
    """Standard deviation of the initial weights; tiny models learn far faster above 0.02."""
    context: int = Field(default=512, ge=16)
    """Longest sequence in tokens."""

    @field_validator("characters")
    @classmethod
    def _characters_differ(cls, characters: str) -> str:
        if len(set(characters)) != len(characters):
            raise ValueError("characters must not repeat")
        return characters

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        return self


class ModelConfig(Section):
    """Origin of the initial weights: a folder or hub name, or `[model.tiny]`."""

    path: str | None = None
    """A local folder with config.json, safetensors and tokenizer, or a name on the hub."""
    tiny: TinyModelConfig | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError('give either path = "folder or hub name", or a [model.tiny] section')
        return self


class LearnerConfig(OptimizerConfig, ObjectiveConfig):
    """The learner group: parallelism, objective, optimizer, checkpoints."""

    on_resume = MAY_CHANGE

    ranks: int = Field(default=1, ge=1)
    """Learner processes, which share every batch."""
    zero_stage: int = Field(default=1, ge=0, le=3)
    """DeepSpeed ZeRO; shared out over ranks: 1 the optimizer's state, 2 gradients, 3 weights."""
    zero_node_ranks: int | None = Field(default=None, ge=2)
    """Ranks of a node, for zero_stage = 3 on several: weights are also shared out within each node,
    and gathered there after the first pass of a step (ZeRO++'s zero_hpz_partition_size)."""
    dtype: Dtype = "float32"
    """Dtype of weights and activations; gradients and the optimizer's weights are float32. `auto`
    is actors.dtype, where that names one; else on GPUs bfloat16; else, on a CPU, float32 for models
    of less than 100 MB and for folders in float32 or float16, whose values bfloat16 would round,
    and bfloat16 for larger ones in bfloat16, which come from memory in half the time. With
    zero_stage 0 or [model.tiny] it is float32. Commands resolve it once and set actors.dtype to the
    same; where neither key is given they take what `auto` is on GPUs."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers and compute their insides again in the backward pass."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and step there; needs zero_stage >= 1."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention in transformers; flash_attention_2 needs a GPU. "auto" takes sdpa
    where it is exact, else eager."""
    cores: Cores | None = None
    """CPU cores of all ranks together, as "1" or "2-5,8"; None leaves it to the system. Shared
    equally; where there are fewer cores than ranks, every rank uses them all."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of a rank; None takes the number of its cores, else 1."""
    compile: bool | None = None
    """Compile blocks of the model (below zero_stage 3) and the head's sums with torch.compile, for
    which the machine needs a C++ compiler. Unset: on GPUs."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each rank: 0, 1, or below 1 for a single rank that shares one."""
    lora: Annotated[LoraConfig | None, ADAPTED] = None
    """An adapter, which is trained in place of the weights. Without this section these are."""

    microbatch_tokens: int = Field(default=2048, ge=16)
    """Capacity of one microbatch in tokens; a longer sequence gets one of its own."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Positions whose logits are held at once while log-probabilities are computed."""
    float32_head: bool = False
    """Form logits in float32 where the model is bfloat16 (ScaleRL)."""

    checkpoint_every: int = Field(default=50, ge=1)
    """Batches between checkpoints; the last version is always saved."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of the newest checkpoints that are always kept."""
    keep_checkpoint_hours: float = Field(default=0.0, ge=0)
    """Hours for which older checkpoints are kept too."""

    def cores_of_rank(self, rank: int) -> list[int] | None:
        """Return the cores of one rank, ascending, or None if the recipe names none.

        They are an equal share, or all cores if there are fewer than ranks.
        """
        if self.cores is None:
            return None
        cores = parse_cores(self.cores)
        share = len(cores) // self.ranks  # without a remainder, as checked below
        return cores[rank * share : (rank + 1) * share] if share else cores

    def stepping_as(self, earlier: Self) -> Self:
        """Return these settings, with those by which a batch moves the weights from others.

        They are the ones that may change between the sessions of a run.
        """
        names = (*OptimizerConfig.model_fields, "critic", "max_token_lag")
        return self.model_copy(update={name: getattr(earlier, name) for name in names})

    @property
    def ranks_of_node(self) -> int | None:
        """Ranks that share out weights once more, in their order; None where one node has all."""
        return self.zero_node_ranks if self.ranks > (self.zero_node_ranks or self.ranks) else None

    @property
    def holds_reference(self) -> bool:
        """True if the reference has weights of its own, and is not the policy without adapter."""
        moves = self.kl is not None and (self.kl.reference or self.kl.refresh_every)
        return self.uses_reference and (self.lora is None or bool(moves))

    @property
    def compiles(self) -> bool:
        """True if torch.compile is used."""
        return self.gpus > 0 if self.compile is None else self.compile

    @property
    def threads_of_rank(self) -> int:
        """Torch threads of one rank."""
        return self.threads or len(self.cores_of_rank(0) or [0])

    @property
    def cpus_of_rank(self) -> float:
        """CPUs that one rank reserves: one a thread, or its part of shared cores."""
        threads = self.threads_of_rank
        available = len(parse_cores(self.cores)) if self.cores else threads * self.ranks
        return min(float(threads), available / self.ranks)

    @model_validator(mode="after")
    def _objective_goes_together(self) -> Self:
        check_traits(self, self.traits)
        return self

    @model_validator(mode="after")
    def _cores_are_shared_equally(self) -> Self:
        if self.cores is None:
            return self
        count = len(parse_cores(self.cores))
        if count > self.ranks and count % self.ranks:
            raise ValueError(
                f"cores = {self.cores!r} are {count} cores, which ranks = {self.ranks} cannot "
                f"share equally; give a multiple of {self.ranks}, or fewer cores than ranks"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_whole_or_shared_with_an_engine(self) -> Self:
        if self.gpus not in (0, 1) and (self.gpus > 1 or self.ranks > 1):
            raise ValueError(
                f"gpus = {self.gpus:g} with ranks = {self.ranks}: a rank computes on one GPU; give "
                "0, 1, or with ranks = 1 a share below 1"
            )
        return self

    @model_validator(mode="after")
    def _a_reference_that_ranks_share_stays(self) -> Self:
        if self.zero_stage == 3 and self.kl is not None and self.kl.refresh_every is not None:
            raise ValueError(
                f"kl.refresh_every = {self.kl.refresh_every} needs zero_stage 0, 1 or 2, not 3, by "
                "which ranks share the reference too; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_shared_out_equally_within_nodes(self) -> Self:
        ranks, of_node = self.ranks, self.zero_node_ranks
        if of_node is not None and (self.zero_stage != 3 or (ranks > of_node and ranks % of_node)):
            raise ValueError(
                f"zero_node_ranks = {of_node} with zero_stage = {self.zero_stage} and ranks = "
                f"{ranks}: it needs zero_stage = 3, which shares out weights, and as many ranks on "
                f"every node, such as ranks = {of_node * -(-ranks // of_node)}; or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _zero_manages_what_is_offloaded(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer = true needs zero_stage 1, 2 or 3, not 0: DeepSpeed offloads "
                "only what ZeRO manages"
            )
        return self

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Self:
        own_critic = None if self.critic is None or self.critic.shared else self.critic
        for where, optimizer in (("", self), ("critic.", own_critic)):
            if optimizer is not None:
                check_deepspeed(
                    optimizer,
                    dtype=self.dtype,
                    zero_stage=self.zero_stage,
                    adapted=optimizer.lora is not None,
                    offload=self.offload_optimizer,
                    where=where,
                )
        return self
