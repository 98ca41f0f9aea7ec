"""Settings of the actors: the sections [actors], [prompts] and [heldout] of a recipe.

Imports nothing heavy. What needs the model, a file or a task is checked when the run starts.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from actors.shipped import ENVIRONMENTS, REWARDS, SOURCES
from actors.vllm_options import check_vllm_options
from headway.cpu_cores import Cores
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.options import parse_options
from headway.recipe_section import Resumable, ResumeRule, Section
from queues.policy.curriculum import CurriculumConfig


def _checked_rewards(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        REWARDS.check(name)
    if len(set(names)) != len(names):
        raise ValueError(f"{list(names)} must name no reward twice")
    return names


RewardNames = Annotated[tuple[str, ...], AfterValidator(_checked_rewards)]
SourceName = Annotated[str, AfterValidator(SOURCES.check)]
VllmOptions = Annotated[dict[str, Any], AfterValidator(check_vllm_options)]
StopString = Annotated[str, Field(strict=True, min_length=1)]
StopId = Annotated[int, Field(strict=True, ge=0)]
OWN_SET = "heldout"
"""Name of the held-out problems that [heldout] itself has."""


ISSUED = ResumeRule("its ledger has prompts, groups and recorded batches that were made with it")
SAMPLED = ResumeRule(
    "rollouts in its ledger, half-finished and waiting to be trained, were sampled and scored with "
    "it"
)
EVALUATED = ResumeRule(
    "its evaluations are planned and queued when it begins, and are compared with each other"
)


class RewardModelConfig(Section):
    """Reward models behind the reward `reward_model`: all in one process, asked in batches."""

    on_resume = SAMPLED

    paths: tuple[str, ...] = ()
    """Model folders or hub names of sequence classifiers with one label; empty takes what `headway
    reward-model` made from the same recipe."""
    kinds: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = Field(default={})
    """Instead of `paths`, the same for each of several kinds, as { helpful = ["a"], safe = ["b"] }.
    The scores of a kind are combined among themselves, and are a part of the reward by its name,
    such as "reward_model/safe", for actors.reward_weights."""
    combine: Literal["min", "mean", "uwo"] = "min"
    """Combination of the scores of several models: the smallest, their mean, or their mean less
    `uncertainty` times their variance (Coste et al. 2023)."""
    uncertainty: float = Field(default=0.5, ge=0)
    """λ: factor of the variance between the models under `uwo`."""
    standardise: bool = True
    """Scale the scores of every model to mean 0 and standard deviation 1 on the held-out pairs, by
    the figures in its folder: otherwise their scales differ by chance."""
    each_step: bool = False
    """Reward every step of a training rollout with its own score by a process reward model, for
    learner.process_rewards; the part of the reward stays the score of the worst step, which is all
    that counts otherwise."""
    batch_size: Resumable[int] = Field(default=32, ge=1)
    """Most texts in one padded batch."""
    max_wait_ms: Resumable[float] = Field(default=5.0, ge=0)
    """Longest that a text waits for others to share its batch."""
    dtype: Resumable[Literal["float32", "bfloat16"]] = "float32"
    """Type that the models compute in; in bfloat16, rounding depends on the batch of a text."""
    cores: Resumable[Cores | None] = None
    """CPU cores, as "1" or "2-5,8"; torch uses as many threads. None: one thread anywhere."""
    gpus: Resumable[float] = Field(default=0.0, ge=0)
    """GPUs that Ray reserves; 0 computes on the CPU."""

    @model_validator(mode="after")
    def _paths_or_kinds(self) -> Self:
        if self.paths and self.kinds:
            raise ValueError("give either paths or kinds: kinds name the folders of each kind")
        return self

    @property
    def named(self) -> tuple[str, ...]:
        """All folders or hub names that the recipe names, kind after kind."""
        return self.paths or tuple(path for paths in self.kinds.values() for path in paths)


class OverlongConfig(Section):
    """Soft penalty on rollouts that come close to their length limit (DAPO).

    There are two limits, and the nearer counts: sampled tokens reach actors.max_new_tokens, or all
    tokens after the prompt, those of tools included, fill the context.
    """

    buffer: int | None = Field(default=None, ge=1)
    """Tokens before the limit over which the penalty grows from 0 to `factor`."""
    share: float | None = Field(default=None, gt=0, le=1)
    """The buffer as a share of the limit, instead."""
    factor: float = Field(default=1.0, gt=0)
    """Penalty of a rollout that reaches the limit."""

    @model_validator(mode="after")
    def _one_buffer(self) -> Self:
        if (self.buffer is None) == (self.share is None):
            raise ValueError(
                f"give either buffer, in tokens, or share, of the limit; found buffer = "
                f"{self.buffer} and share = {self.share}"
            )
        return self

    def tokens(self, limit: int) -> int:
        """Return the buffer in tokens, at least 1."""
        return self.buffer or max(1, round((self.share or 0) * limit))


class GoldConfig(Section):
    """Gold reward, held back from training: it shows whether the policy hacks the reward."""

    on_resume = SAMPLED

    reward: RewardNames = Field(min_length=1)
    """Rewards that are trusted more than actors.reward, in the same form, such as a judge or tests
    that are too slow to score every rollout."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the training prompts whose rollouts it scores, chosen by a hash of their ids; 16
    groups of a batch, or 64 if the gold reward errs, are enough to find a hack early."""
    on_hacking: Resumable[Literal["warn", "stop"]] = "warn"
    """Response where the reward rises and the gold reward does not. `warn` says so: on the
    terminal, in the report, by a metric and an alert. `stop` also ends the run with a checkpoint;
    one that is resumed goes on, and is watched from there."""


class GatewayConfig(Section):
    """The gateway, by which agents ask the policy through the APIs of OpenAI and Anthropic."""

    on_resume = SAMPLED

    host: Resumable[str] = "127.0.0.1"
    """Address that it listens on. "0.0.0.0" lets agents on other machines ask; each needs the key
    of its session."""
    tool_parser: str | None = "auto"
    """Parser of tool calls in what the policy says, by vLLM's name, such as hermes. `auto` takes
    that of the chat template, where it is known by it; None leaves tool calls in the text."""
    reasoning_parser: str | None = None
    """Parser of what the policy thinks, by vLLM's name, such as deepseek_r1; None leaves it in the
    text."""


class ActorsConfig(Section):
    """Rollout actors: their engines, how they sample, and what scores them."""

    on_resume = SAMPLED

    count: Resumable[int] = Field(default=1, ge=1)
    """Actors, each with an engine of its own; `headway scale` changes it in a live run."""
    min_count: Resumable[int | None] = Field(default=None, ge=1)
    """Actors that the run needs: one that dies more often than deploy.max_restarts allows, at its
    start or later, is given up while as many as this are left; None ends the run then. The actor of
    heldout.pinned is needed always."""
    max_count: Resumable[int | None] = Field(default=None, ge=1)
    """Let more actors join a live run, up to this number, whenever nodes of the cluster have free
    resources for them, and leave with their nodes, or where a learner or reward models that lost
    theirs need them. None keeps `count`, as `headway scale` does."""
    engine: Literal["vllm", "scripted"] = "vllm"
    """`scripted` needs no model and learns nothing: it is for tests and for load."""
    environment: Annotated[str, AfterValidator(ENVIRONMENTS.check)] = "single_turn"
    """`single_turn`, `tools`, or the dotted path "module:Class" of a conversation of yours; or an
    agent, which asks the policy through the gateway: `program:COMMAND`, "module:function",
    `remote` for those on other machines, or `verifiers:ID` of a taskset of that library."""
    environment_options: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment; of `tools` those of `ToolOptions`, of a program those
    of `ProgramOptions`, such as python, the interpreter of its libraries, and memory_gib."""
    environment_timeout_seconds: Resumable[float] = Field(default=300.0, gt=0)
    """Deadline of each answer of the environment; past it the rollout fails."""
    max_turns: int = Field(default=32, ge=1)
    """Most messages of the policy in one rollout; it is cut off where the environment would go on.
    """
    reward: RewardNames = ("reasoning_gym",)
    """Rewards, added up: exact_match, last_answer, numeric_match, tags, regex, json_schema,
    similarity, math_verify, reasoning_gym, code, reward_model, llm_judge, pairwise_judge, or dotted
    paths. None where the environment gives all of it. A dotted path is "module:function" of
    score(prompt, completion, answer, metadata) -> float | dict[str, float], or of a `group_reward`,
    which scores all completions of a group."""
    heldout_reward: Annotated[RewardNames | None, EVALUATED] = None
    """Rewards of held-out rollouts, in the same form; None takes `reward`."""
    reward_options: dict[str, dict[str, Any]] = Field(default={})
    """Keyword arguments of rewards by name, as { regex = { pattern = "…" } }."""
    reward_weights: dict[str, float] = Field(default={})
    """Factors of rewards by name, or of their parts, as { "reward_model/safe" = 0.5 }; 1 for the
    others. The parts of a rollout are recorded without
    factors: learner.advantage = "gdpo" weighs parts by its own option."""

    temperature: float = Field(default=1.0, ge=0.01, le=2)
    """Temperature of training rollouts, within what vLLM takes unchanged. The learner divides its
    logits by it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that reach this mass; 1 is the whole distribution, which
    all but the losses `raft` and `dpo` need: the learner's log-probabilities are of all tokens."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the k most probable tokens; −1 is no limit. As for `top_p`."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Most tokens that the policy samples in one rollout, over all of its turns."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest rollout in tokens, its prompt included; None takes the context of the model."""
    chat_template: bool | Literal["auto"] = "auto"
    """Render prompts with the tokenizer's chat template; `auto`: if it has one. If false, texts of
    special tokens in prompts stand for these."""
    chat_template_options: dict[str, Any] = Field(default={})
    """Variables that the chat template reads, as { enable_thinking = false }. They apply wherever a
    prompt is rendered: rollouts, evaluations, `headway sft` and reward models."""
    stop: tuple[StopString | StopId, ...] = ()
    """Texts and token ids that end a message of the policy, besides the model's end-of-sequence
    tokens and the token that ends messages in the chat template. The token that completes a stop is
    the last one that is sampled, and it trains."""
    include_stop: bool = False
    """Leave the stop in the completion that rewards and environments see; else it is cut off."""
    skip_special_tokens: bool = False
    """Leave all special tokens out of the text that rewards and environments see, <think> and
    <tool_call> too where they are ones; else only those with a name, such as EOS and padding."""
    max_concurrent_rollouts: Resumable[int] = Field(default=128, ge=1)
    """Rollouts that one engine generates at once; at least prompts.group_size, and one more with
    greedy_baseline."""
    overlong: OverlongConfig | None = None
    """Soft penalty on training rollouts that come close to their limit; None: no penalty."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Penalty of a training rollout that the policy did not end itself."""
    greedy_baseline: Annotated[bool, ISSUED] = False
    """Generate one more rollout for every training group, greedily by the same weights: it is
    scored and not trained, and its reward is the baseline of ReMax."""
    reward_timeout_seconds: Resumable[float] = Field(default=30.0, gt=0)
    """Deadline of each reward of a rollout; past it the rollout fails, or the service that the
    reward waits for over the network counts as away."""
    code_execution: Resumable[Literal["off", "sandbox"]] = "off"
    """Allow the reward `code` and the tool `python` to run programs that a model writes, in a
    sandbox; without one on the machine, the run is refused."""
    reward_processes: Resumable[int] = Field(default=2, ge=1)
    """Processes of each actor that call rewards at once; while some calls are slow, up to eight
    times as many."""
    reward_memory_gib: Resumable[float] = Field(default=4.0, gt=0)
    """Private memory of such a process; a reward that needs more fails its rollout."""
    reward_environment: Resumable[tuple[str, ...]] = ()
    """Names of environment variables that rewards of yours get, such as a key of theirs, besides
    PATH, HOME, the language and other settings that are no secrets."""
    verifier_seconds: Resumable[float] = Field(default=2.0, gt=0)
    """Processor time for one completion of math_verify, reasoning_gym, regex, json_schema and
    similarity, which run in a sandbox; a completion that takes more scores 0."""
    rollout_timeout_seconds: Resumable[float] = Field(default=1800.0, gt=0)
    """Deadline of a whole rollout, rewards included; past it the rollout fails."""

    on_timeout: Literal["fail"] | float = "fail"
    """Reward of a rollout whose tool or environment took too long to answer the policy: past
    environment_timeout_seconds, or for most of rollout_timeout_seconds. `fail` samples it again, so
    that a policy can learn to avoid bad rewards by being slow. A wait for a service never scores.
    """
    outage_seconds: Resumable[float] = Field(default=600.0, ge=0)
    """Longest wait for a service that rewards, tools or an environment ask, while it is away: it
    refuses or breaks off connections, is overloaded (HTTP 5xx, 429) or does not answer in time.
    Calls are repeated with growing pauses, which count neither as attempts of the prompt nor
    against deadlines; past it the run ends and names the service."""

    dtype: Resumable[Literal["float32", "bfloat16", "auto"]] = "auto"
    """Type that the engine computes in; `auto` takes that of the model folder, float32 included.
    Where neither this key nor learner.dtype is given, a learner on GPUs makes it bfloat16."""
    float32_head: Resumable[bool] = False
    """Let the engine form logits in float32 where the model is bfloat16, as learner.float32_head
    does in the learner; ScaleRL wants both."""
    cores: Resumable[tuple[Cores, ...] | None] = None
    """CPU cores of each engine, one entry per actor, as "0" or "2-5,8". None: engines
    without GPUs share out the cores that learner.cores leaves."""
    kv_cache_gib: Resumable[float | None] = Field(default=None, gt=0)
    """KV cache of an engine on a CPU. None takes what max_concurrent_rollouts need at their full
    length, but at most a quarter of the free memory for all engines together."""
    gpu_memory_utilization: Resumable[float | None] = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for weights and KV cache; None takes 0.9, or nine tenths of `gpus`
    where that is a share of one GPU."""
    tensor_parallel_size: Resumable[int] = Field(default=1, ge=1)
    """GPUs, or CPU sockets, that share the model of one engine."""
    enforce_eager: Resumable[bool | Literal["auto"]] = "auto"
    """No compilation, and no CUDA graphs: right for tiny models; `auto`: on a CPU, not on a GPU."""
    cpus: Resumable[float] = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for each actor."""
    gpus: Resumable[float] = Field(default=0.0, ge=0)
    """GPUs that Ray reserves for each actor: none, tensor_parallel_size, or a share of one, which
    others may use too; gpu_memory_utilization then is at most that share. A run on this machine
    whose recipe says nothing of GPUs takes those that are here, if there are enough."""
    vllm_options: Resumable[VllmOptions] = Field(default={})
    """Options of vLLM by its own names, such as kv_cache_dtype, max_num_batched_tokens, load_format
    or enable_expert_parallel; `actors.vllm_options` lists those that are passed on."""
    scripted_options: Resumable[dict[str, Any]] = Field(default={})
    """Keywords of the scripted engine, such as tokens_per_second and median_length."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Settings of the reward `reward_model`."""
    gold: GoldConfig | None = None
    """A gold reward; None watches no reward."""
    gateway: GatewayConfig = GatewayConfig()
    """The gateway, for agents that are programs."""

    @field_validator("top_k")
    @classmethod
    def _top_k_is_not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; -1 is no limit")
        return value

    @model_validator(mode="after")
    def _rewards_are_given_and_used(self) -> Self:
        unrewarded = not self.reward or self.heldout_reward == ()
        if unrewarded and self.environment in ("single_turn", "tools"):
            raise ValueError(
                f'with actors.environment = "{self.environment}" actors.reward must name at least '
                "one reward; other environments may give all of it by themselves"
            )
        used = dict.fromkeys(self.all_rewards)
        kinds = [f"reward_model/{kind}" for kind in self.reward_model.kinds]
        for name in self.reward_weights if kinds else ():
            if name.startswith("reward_model/") and name not in kinds:
                raise ValueError(
                    f"actors.reward_weights names {name}, which is no kind of "
                    f"actors.reward_model.kinds; they give {', '.join(kinds)}{nearest(name, kinds)}"
                )
        for setting, values in (
            ("reward_options", self.reward_options),
            ("reward_weights", self.reward_weights),
        ):
            unused = sorted(
                name for name in values.keys() - used
                if setting == "reward_options" or name.partition("/")[0] not in used
            )  # fmt: skip
            if unused:
                raise ValueError(
                    f"actors.{setting} names {', '.join(unused)}, which is no reward of this "
                    f"recipe; it has {', '.join(used)}{nearest(unused[0], used)}"
                )
        return self

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        count = f"actors.count = {self.count}"
        if self.max_count is not None and self.max_count < self.count:
            raise ValueError(f"actors.max_count = {self.max_count} must be at least {count}")
        if self.min_count is not None and self.min_count > self.count:
            raise ValueError(f"actors.min_count = {self.min_count} must be at most {count}")
        if self.cores is not None and self.max_count is not None:
            raise ValueError(
                f"actors.cores has {len(self.cores)} entries, and actors.max_count = "
                f"{self.max_count} adds actors that it has none for; leave one of them out"
            )
        if self.cores is not None and len(self.cores) != self.count:
            raise ValueError(
                f"actors.cores has {len(self.cores)} entries for actors.count = {self.count}; "
                "give one list of cores per actor"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_one_a_worker_or_a_share(self) -> Self:
        shares = 0 < self.gpus < 1 and self.tensor_parallel_size == 1
        if self.gpus > 0 and self.gpus != self.tensor_parallel_size and not shares:
            raise ValueError(
                f"actors.gpus = {self.gpus:g} must equal actors.tensor_parallel_size = "
                f"{self.tensor_parallel_size}, or be a share of one GPU: an engine uses one GPU "
                "per rank, and sees only those that Ray reserves"
            )
        if shares and self.gpu_memory_share > self.gpus:
            raise ValueError(
                f"actors.gpu_memory_utilization = {self.gpu_memory_share:g} must be at most "
                f"actors.gpus = {self.gpus:g}: the rest of the GPU belongs to others"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.max_model_len is not None and self.max_model_len <= self.max_new_tokens:
            raise ValueError(
                f"actors.max_model_len = {self.max_model_len} must exceed actors.max_new_tokens = "
                f"{self.max_new_tokens}: the prompt needs space too"
            )
        buffer = self.overlong.tokens(self.max_new_tokens) if self.overlong else 0
        if buffer > self.max_new_tokens:
            raise ValueError(
                f"actors.overlong.buffer = {buffer} must be at most "
                f"actors.max_new_tokens = {self.max_new_tokens}: it is the end of that length"
            )
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        options = {"scripted": self.scripted_options, "vllm": self.vllm_options}
        for engine, given in options.items():
            if given and self.engine != engine:
                raise ValueError(
                    f'actors.{engine}_options has no effect with actors.engine = "{self.engine}"'
                )
        if self.include_stop and not self.stop:
            raise ValueError("actors.include_stop = true has no effect without actors.stop")
        return self

    @property
    def gpu_memory_share(self) -> float:
        """Share of a GPU's memory that an engine takes."""
        return self.gpu_memory_utilization or 0.9 * (self.gpus if 0 < self.gpus < 1 else 1.0)

    @property
    def asks_reward_models(self) -> bool:
        """True if a reward needs the process of the reward models."""
        return "reward_model" in self.all_rewards

    @property
    def all_rewards(self) -> tuple[str, ...]:
        """Names of the rewards of training and evaluations, and of the gold reward."""
        gold = () if self.gold is None else self.gold.reward
        return (*self.reward, *(self.heldout_reward or ()), *gold)


class PromptsConfig(Section):
    """The source of prompts, and the size of a batch."""

    on_resume = ISSUED

    source: SourceName
    """`files`, `datasets:NAME`, `mixture`, `lettered_chain_sum`, `tiny:TASK`, `reasoning_gym:TASK`,
    `verifiers:ID`, or the dotted path "module:Class"."""
    source_options: dict[str, Any] = Field(default={})
    """Keywords of the source: of `files` path, heldout_path and how rows are read, of `mixture` its
    parts, of reasoning-gym the task's, or the level of its curriculum."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Prompts with more tokens, as the chat template renders them, are left out, held-out ones too.
    None leaves out none; one that is longer than the context then ends the run before it begins."""
    groups_per_batch: int = Field(default=16, ge=1)
    """B: groups that are trained at one version."""
    group_size: int = Field(default=8, ge=1)
    """G: rollouts of one prompt."""
    pass_rate_cap: float | None = Field(default=None, gt=0, le=1)
    """Share of a group that may pass before its prompt is mastered: from there on the prompt is not
    issued again in later epochs. None issues every prompt in every epoch."""
    pass_threshold: float = 1.0
    """Reward from which a rollout passes, without penalties for its length."""
    curriculum: CurriculumConfig | None = None
    """Curriculum by success: prompts that sometimes pass are issued more often than those that
    always or never do, beside the weights over time of a mixture's parts. None: all alike."""
    on_change: Resumable[Literal["refuse", "new_epoch"]] = "refuse"
    """Behaviour of a resumed run if its prompts or held-out problems are not those of its last
    session any more: refuse, or leave the epoch and begin a new one of the present prompts, in
    which none comes twice. Evaluations keep the held-out problems that the run began with, and
    neither these nor the present ones are drawn from then on."""


class HeldoutSet(Section):
    """A held-out set with a name."""

    source: SourceName
    options: dict[str, Any] = Field(default={})
    size: int | None = Field(default=None, ge=1)


def _checked_sets(sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if OWN_SET in sets:
        raise ValueError(f"{OWN_SET!r} is the name of the section's own problems; choose another")
    try:
        for name, options in sets.items():
            parse_options(HeldoutSet, f"heldout.sets.{name}", options)
    except InputError as error:
        raise ValueError(str(error)) from None
    return sets


class HeldoutConfig(Section):
    """Evaluation on problems that are never trained."""

    on_resume = EVALUATED

    source: SourceName | None = None
    """Source in the form of prompts.source; None takes the held-out problems of the training
    source, which then never draws them for training."""
    source_options: dict[str, Any] = Field(default={})
    """Keywords of `source`; empty takes prompts.source_options."""
    sets: Annotated[dict[str, dict[str, Any]], AfterValidator(_checked_sets)] = Field(default={})
    """More held-out sets, by their names, which `headway eval` scores and nothing trains: tables
    with `source`, its `options`, and the `size`, which is that of the section by default, as in
    { hard = { source = "files", options = { path = "hard.jsonl" }, size = 200 } }."""
    judge: Resumable[dict[str, Any]] = Field(default={})
    """Options of the reward llm_judge, with which `headway eval --against` compares answers of two
    models; `instruction` asks for pairs by default. Empty compares their held-out rewards."""
    size: int = Field(default=500, ge=1)
    """Problems of an evaluation."""
    every: int = Field(default=10, ge=1)
    """Versions between evaluations; the initial and the last version are always evaluated."""
    final_size: int | None = Field(default=None, ge=1)
    """Problems at the initial and at the last version; None takes `size`."""
    sampled: bool = False
    """Evaluate at actors.temperature too, not only greedily."""
    samples: int = Field(default=1, ge=1)
    """Rollouts of each problem at actors.temperature; several (k) also give pass@k, the mean over
    the problems of the best of their k rewards."""

    pinned: Resumable[bool] = False
    """Let the first actor do nothing but evaluate, and take no new version before it is done: all
    rollouts of a score are of one version, and the other actors go on with training. It needs
    actors.count of 2 or more. Else all actors evaluate, and may take new versions meanwhile."""
    pinned_seconds: Resumable[float] = Field(default=600.0, gt=0)
    """Longest that a new version waits for that; past it the rest is evaluated with newer versions,
    and the score names all of them."""

    @model_validator(mode="after")
    def _samples_are_sampled(self) -> Self:
        if self.samples > 1 and not self.sampled:
            raise ValueError(
                f"heldout.samples = {self.samples} has no effect without heldout.sampled = true"
            )
        return self
