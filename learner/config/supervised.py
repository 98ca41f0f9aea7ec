"""Settings of supervised training: sections `[sft]`, `[prefer]` and `[reward_model]`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headway.options import parse_options
from headway.recipe_section import Section
from learner.config.lora import LoraConfig
from learner.config.optimizer import Dtype, OptimizerConfig, check_deepspeed


class SupervisedConfig(OptimizerConfig):
    """Settings that the stages before reinforcement have in common."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of what is trained; None takes the run's. Recipes with one name share it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the source's `demonstrations` or `preferences`; of a data set split, config and
    revision; of it or a file prompt_field and completion_field, where columns have other names."""
    muon_learning_rate: float | None = Field(default=0.02, gt=0)
    """Full rate of Muon; without effect under `adamw`."""
    ranks: int = Field(default=1, ge=1)
    """Processes that share every batch. One is that of the command; several are started by Ray,
    placed as the learner's of a run."""
    gpus: int = Field(default=0, ge=0, le=1)
    """GPUs of each of several ranks. One rank takes the GPU of its machine, if there is one."""
    zero_stage: int = Field(default=0, ge=0, le=3)
    """DeepSpeed ZeRO, as learner.zero_stage."""
    dtype: Dtype = "float32"
    """Dtype of weights and activations, as learner.dtype; `auto` looks at the model that it begins
    with, and not at actors.dtype."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Implementation of attention in transformers, as learner.attention."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of a rank; None takes as many as one of the learner has in a run on this
    machine."""
    lora: LoraConfig | None = None
    """An adapter, which is trained in place of the weights and merged into the model at the end."""

    @model_validator(mode="after")
    def _deepspeed_can(self) -> Self:
        adapted = self.lora is not None
        check_deepspeed(self, dtype=self.dtype, zero_stage=self.zero_stage, adapted=adapted)
        return self


class DemonstrationSource(Section):
    """One of several sources of demonstrations."""

    source: str
    """As sft.demonstrations."""
    options: dict[str, Any] = Field(default_factory=dict)
    """As sft.options."""
    weight: float = Field(default=1.0, gt=0, le=1e100)
    """Share of the demonstrations that are drawn from it, against the others."""


class StageConfig(SupervisedConfig):
    """Settings of stages that train a policy."""

    checkpoint_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints, from the newest of which the command goes on after an
    interruption. None writes none."""
    eval_every: int | None = Field(default=None, ge=1)
    """Optimizer steps between two measurements of the loss of held-out examples; None measures it
    after the last step alone."""
    logprob_chunk: int = Field(default=1024, ge=1)
    """Positions whose logits are held at once."""
    steps: int = Field(default=1000, ge=1)
    """Optimizer steps."""
    microbatch_tokens: int = Field(default=512, ge=16)
    """Capacity of one microbatch in tokens; a longer text gets one of its own."""


class SftConfig(StageConfig):
    """Supervised warm start on demonstrations: `headway sft RECIPE`."""

    demonstrations: str | Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1)]
    """Pairs with the fields prompt and completion, or conversations with the field messages: a
    JSONL, CSV, Parquet or Arrow file, `datasets:NAME`, or the name or dotted path of a prompt
    source that has worked examples. Or a list of them, which may have options and weights, as
    [{ source = "a.jsonl", weight = 2 }, "b.jsonl"]."""
    heldout: str | Annotated[int, Field(ge=1)] | None = None
    """Demonstrations whose loss is measured, in nats per learned token, and whose prompts are never
    trained: a number of those drawn first, or a file or data set, as demonstrations. None measures
    nothing."""
    heldout_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a file or data set of held-out demonstrations, as `options`."""
    batch_tokens: int = Field(default=1024, ge=16)
    """Smallest number of tokens of one optimizer step, prompts included."""

    @property
    def parts(self) -> tuple[DemonstrationSource, ...]:
        """The sources of demonstrations with their options and weights."""
        named = self.demonstrations
        if isinstance(named, str):
            return (DemonstrationSource(source=named, options=self.options),)
        entries = (part if isinstance(part, dict) else {"source": part} for part in named)
        return tuple(
            parse_options(DemonstrationSource, f"sft.demonstrations, entry {number}", entry)
            for number, entry in enumerate(entries, start=1)
        )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> Self:
        if self.parts and self.options and not isinstance(self.demonstrations, str):
            raise ValueError(
                "options have no effect where demonstrations is a list; give each source its own, "
                "as { source = …, options = … }"
            )
        if self.heldout_options and not isinstance(self.heldout, str):
            raise ValueError(
                f"heldout_options have no effect with heldout = {self.heldout}; they are those of "
                'a data set, as heldout = "datasets:NAME"'
            )
        if self.eval_every is not None and self.heldout is None:
            raise ValueError(
                f"eval_every = {self.eval_every} measures nothing without heldout; give a number "
                "of demonstrations or a file, or leave it out"
            )
        return self


class PreferConfig(StageConfig):
    """Offline preferences: `headway prefer RECIPE`.

    They begin from the recipe's model, or its warm start where there is one, which is the reference
    too; reinforcement begins from their result.
    """

    pairs: str
    """Rows with the fields chosen and rejected, and a prompt unless it begins both; for KTO also
    with prompt, completion and label. Texts, or lists of messages: a JSONL, CSV, Parquet or Arrow
    file, `datasets:NAME`, or the name or dotted path of a prompt source that has preferences."""
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """The loss; formulas and options are in `learner/docs/objectives.md`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the loss."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs of one optimizer step; under KTO judged completions, of which a pair is two."""
    microbatch_tokens: int = Field(default=2048, ge=16)
    """Capacity of one microbatch in tokens; a longer pair gets one of its own."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Full rate of AdamW."""
    heldout_pairs: int = Field(default=256, ge=1)
    """Pairs that are never trained; loss and accuracy are measured on them."""


class RewardTrainingConfig(SupervisedConfig):
    """Reward models from preference pairs or labelled steps: `headway reward-model RECIPE`."""

    kind: Literal["outcome", "process"] = "outcome"
    """`outcome` scores a whole completion, `process` each of its steps, by the probability that it
    is right."""
    pairs: str
    """As prefer.pairs, all with chosen and rejected. For `process` (prompt, completions, labels)
    triples: the steps of a completion, and for each true, false, or the share of right answers that
    were sampled from there on; of a source its labelled_steps."""
    separator: str = Field(default="\n\n", min_length=1)
    """Text between the steps of a completion, where the policy's are split too; with `process`."""
    path: str | None = None
    """A model folder or hub name to begin with; None takes the recipe's model, or its warm start
    where there is one."""
    members: int = Field(default=1, ge=1)
    """Models to train, one after the other: each with a head and an order of pairs of its own."""
    steps: int = Field(default=500, ge=1)
    """Optimizer steps of each model."""
    batch_pairs: int = Field(default=32, ge=1)
    """Pairs, or completions with labelled steps, of one optimizer step."""
    microbatch_tokens: int = Field(default=2048, ge=16)
    """Capacity of one microbatch in tokens; a longer pair gets one of its own."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Full rate of AdamW."""
    centring: float = Field(default=0.01, ge=0)
    """Weight of (s_w + s_l)² in the loss, which keeps scores around 0."""
    margin: float = Field(default=0.0, ge=0)
    """By how much the better score should exceed the worse one."""
    heldout_pairs: int = Field(default=256, ge=1)
    """Pairs or completions that are never trained; accuracy is measured on them."""
    activation_checkpointing: bool = False
    """Keep only the inputs of layers and compute their insides again in the backward pass."""

    @model_validator(mode="after")
    def _separator_has_an_effect(self) -> Self:
        if self.kind != "process" and self.separator != "\n\n":
            raise ValueError('separator is for kind = "process" alone; leave it out')
        return self
