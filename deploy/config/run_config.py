"""A recipe: one validated model per folder, composed from TOML and `--set key=value`.

Imports no torch, vLLM or Ray, so that `headway validate` answers at once. What needs the model or
the data on disk is checked when the run starts.
"""

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from actors.config import ActorsConfig, HeldoutConfig, PromptsConfig
from actors.registry import REWARDS
from deploy.config.messages import explain
from deploy.config.objective_rules import check_against_objective
from deploy.config.placement_config import Placements
from deploy.config.presets import on_demo, preset_names, with_preset
from deploy.config.weight_transport_rules import refusal
from deploy.errors import InputError
from learner.config.learner import LearnerConfig, ModelConfig, SftConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.reward_model import RewardTrainingConfig
from queues.config import QueuesConfig
from weight_sync.config import WeightSyncConfig

SHIPPED_RECIPES = Path(__file__).parents[1] / "recipes"

SIGNAL_OF_TIES = {
    "remax": "which compares with a greedy rollout",
    "reinforce": "which compares with rollouts of other groups",
    "reinforce_pp": "which compares with rollouts of other groups",
    "gdpo": "which compares each part of the reward, and parts may differ where sums do not",
}
"""Advantages under which a group whose rollouts earn the same still has a gradient."""


class DeployConfig(BaseModel):
    """Where a run lives and which Ray cluster it uses."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    ray_address: str = Field(default="local", pattern=r"^(local|auto|(ray://)?[^\s/]+:\d+)$")
    """`local` starts a cluster on this machine for the run; else "host:port", or `auto`."""
    placement: Placements = Placements()
    """Which nodes of a cluster the roles of the run work on."""
    metrics: bool = True
    """Show metrics of every process to Prometheus, which finds them at one address of the run."""
    engine_metrics: bool = False
    """Show some of vLLM's own metrics beside those of each actor (`actors.metrics`). vLLM then
    counts every token of every request, which takes some percent of the actor's process."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of that address; 0 takes a free one, which the command prints."""
    metrics_host: str = Field(default="127.0.0.1", pattern=r"^[0-9A-Za-z.:-]+$")
    """Address that all of them bind to. The default shows them on their own machine alone; on a
    cluster "0.0.0.0" lets a Prometheus elsewhere reach them, and everybody else who can."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Send the figures of each batch to TensorBoard (files in the run's folder) or Weights & Biases
    (offline unless WANDB_MODE = "online"); each is an extra of the same name."""
    runs_dir: Path = Path("runs")
    """Folder of run folders, relative to where the command runs."""

    @field_validator("runs_dir")
    @classmethod
    def _expanded(cls, value: Path) -> Path:
        return value.expanduser()

    start_timeout_seconds: float = Field(default=600, gt=0)
    """Deadline for every process to have loaded the model."""
    stall_seconds: float = Field(default=900, gt=0)
    """A run in which for so long no batch is trained and no result accepted is ended, naming who
    waits for what. It must exceed the longest step and the longest rollout."""
    watchdog_seconds: float = Field(default=300, gt=0)
    """A wait that lasts so long without anything changing is named, with the stacks of whom it is
    for: on the screen, in `headway top`, in waits.jsonl and by a metric. It must exceed the longest
    step and the longest rollout."""
    watchdog_aborts: bool = False
    """End the run then, after a checkpoint where the learner can save one."""
    checkpoint_seconds: float = Field(default=12, gt=0)
    """After an interrupt: how long the learner may take to end its step and save a checkpoint."""
    max_failed_groups: int = Field(default=64, ge=0)
    """Groups that may fail for good, by a reward that raises or a prompt that does not fit, before
    the run is ended with their last error."""
    max_restarts: int = Field(default=5, ge=0)
    """How often in a row an actor that died is made again before the run is ended with its last
    error; one that worked for 10 minutes begins anew."""


class RunConfig(BaseModel):
    """A whole recipe."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run and of its folder."""
    preset: str | None = None
    """The algorithm under a name; it fills in what the recipe does not say. `headway presets` lists
    them."""
    seed: int = Field(default=0, ge=0, le=10**8)
    steps: int = Field(ge=1)
    """Batches to train, which is also the number of published versions after the initial one."""
    model: ModelConfig
    prompts: PromptsConfig
    actors: ActorsConfig = ActorsConfig()
    queues: QueuesConfig = QueuesConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    heldout: HeldoutConfig | None = None
    sft: SftConfig | None = None
    reward_model: RewardTrainingConfig | None = None
    deploy: DeployConfig = DeployConfig()

    @model_validator(mode="after")
    def _suits_the_objective(self) -> Self:
        check_against_objective(self, self.learner.traits)
        return self

    @model_validator(mode="after")
    def _minibatches_have_groups(self) -> Self:
        minibatches, groups = self.learner.minibatches, self.prompts.groups_per_batch
        if minibatches > groups:
            raise ValueError(
                f"learner.minibatches = {minibatches} must be at most prompts.groups_per_batch = "
                f"{groups}: a minibatch is made of whole groups"
            )
        return self

    @model_validator(mode="after")
    def _the_window_holds_a_batch(self) -> Self:
        window, batch = self.queues.window, self.prompts.groups_per_batch
        if window is not None and window < batch:
            raise ValueError(
                f"queues.window = {window} must be at least prompts.groups_per_batch = {batch}: no "
                "batch could ever be ready"
            )
        return self

    @model_validator(mode="after")
    def _a_group_has_room(self) -> Self:
        room, size = self.actors.max_concurrent_rollouts, self.prompts.group_size
        more = ", and one more for actors.greedy_baseline" if self.actors.greedy_baseline else ""
        if room < self.rollouts_per_group:
            raise ValueError(
                f"actors.max_concurrent_rollouts = {room} must be at least prompts.group_size = "
                f"{size}{more}: no group could ever be leased"
            )
        return self

    @model_validator(mode="after")
    def _weights_reach_where_actors_are(self) -> Self:
        refused = refusal(self.weight_sync, self.learner, self.actors, self.deploy.placement)
        if refused is not None:
            raise ValueError(refused)
        return self

    @model_validator(mode="after")
    def _someone_trains_beside_the_evaluation(self) -> Self:
        if self.heldout is not None and self.heldout.pinned and self.actors.count < 2:
            raise ValueError(
                "heldout.pinned = true keeps one actor for evaluations, and actors.count = "
                f"{self.actors.count} leaves none for training; set actors.count to 2 or more, or "
                "heldout.pinned = false"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_differ(self) -> Self:
        for name, drops in (
            ("queues.filter_tied", self.queues.filter_tied),
            ("learner.drop_tied", self.learner.drop_tied),
        ):
            if drops and self.prompts.group_size < 2:
                raise ValueError(
                    f"{name} drops groups whose rollouts earn the same, which one rollout always "
                    "does; prompts.group_size must be at least 2, not 1"
                )
        signal = SIGNAL_OF_TIES.get(self.learner.advantage)
        if self.queues.filter_tied and signal is not None:
            raise ValueError(
                f"queues.filter_tied = true with learner.advantage = {self.learner.advantage!r}, "
                f"{signal}: a group whose rollouts earn the same teaches something, and its loss "
                "would shift what is learned; set queues.filter_tied = false"
            )
        return self

    @model_validator(mode="after")
    def _the_policy_learns_too(self) -> Self:
        critic = self.learner.critic
        if critic is not None and critic.pretrain_batches >= self.steps:
            raise ValueError(
                f"learner.critic.pretrain_batches = {critic.pretrain_batches} must be below steps "
                f"= {self.steps}: all batches would train the critic alone"
            )
        return self

    @model_validator(mode="after")
    def _retired_prompts_would_come_again(self) -> Self:
        source, cap = self.prompts.source, self.prompts.pass_rate_cap
        endless = source.partition(":")[0] in ("lettered_chain_sum", "reasoning_gym")
        if cap is not None and endless:
            raise ValueError(
                f"prompts.pass_rate_cap = {cap} has no effect with prompts.source = {source!r}, "
                'which always draws new problems; it is for "files", and for sources of your own '
                "that come back to theirs"
            )
        return self

    @model_validator(mode="after")
    def _reward_fits_the_source(self) -> Self:
        kind = self.prompts.source.partition(":")[0]
        if "reasoning_gym" in self.actors.reward and kind in ("files", "lettered_chain_sum"):
            fitting = ", ".join(name for name in REWARDS.names if name != "reasoning_gym")
            raise ValueError(
                f'actors.reward = ["reasoning_gym"] scores problems of reasoning_gym:TASK alone, '
                f"and prompts.source = {self.prompts.source!r}; set actors.reward to one or more "
                f'of {fitting}, or to your own "module:function"'
            )
        return self

    @model_validator(mode="after")
    def _reward_models_come_from_somewhere(self) -> Self:
        named = self.actors.reward_model.paths or self.reward_model
        if self.actors.asks_reward_models and not named:
            raise ValueError(
                'the reward "reward_model" needs reward models: name model '
                "folders in actors.reward_model.paths, or add a [reward_model] section, from which "
                "`headway reward-model` trains them"
            )
        return self

    @model_validator(mode="after")
    def _baseline_has_a_group(self) -> Self:
        name, size = self.learner.advantage, self.prompts.group_size
        sets = self.learner.advantage_options.get("k", 4)
        if name == "pass_at_k" and isinstance(sets, int) and sets >= size:
            raise ValueError(
                f"learner.advantage_options.k = {sets} must be below prompts.group_size = {size}: "
                "the whole group is a single set, which says nothing of one rollout"
            )
        batch = self.prompts.groups_per_batch * self.prompts.group_size
        baseline = self.learner.advantage_options.get("baseline", "mean")
        if self.learner.advantage == "reinforce" and baseline != "ema" and batch < 2:
            raise ValueError(
                'learner.advantage = "reinforce" compares the rollouts of a batch, so '
                "prompts.groups_per_batch times group_size must be at least 2, not 1; or set "
                'learner.advantage_options = { baseline = "ema" }'
            )
        return self

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts that an engine generates for a training group, a baseline included."""
        return self.prompts.group_size + self.actors.greedy_baseline

    @property
    def objective(self) -> LearnerConfig:
        """The learner's settings with what they take over from other sections filled in."""
        length = self.learner.fixed_length or self.actors.max_new_tokens
        limit = self.learner.max_token_lag
        if self.queues.on_overdue == "mask":
            bound = self.queues.max_staleness
            limit = bound if limit is None else min(limit, bound)
        return self.learner.model_copy(update={"fixed_length": length, "max_token_lag": limit})

    @property
    def flow(self) -> QueuesConfig:
        """The queues' settings with the window filled in."""
        batch, actors = self.prompts.groups_per_batch, self.actors
        held = actors.count * (actors.max_concurrent_rollouts // self.rollouts_per_group)
        window = self.queues.window or batch + max(batch, held) + (batch + 3) // 4
        return self.queues.model_copy(update={"window": window})

    @property
    def warm_start(self) -> Path:
        """Folder of the model that `headway sft` makes from this recipe."""
        name = (self.sft.name if self.sft else None) or self.name
        return self.deploy.runs_dir / f"{name}-sft" / "model"

    @property
    def reward_models(self) -> Path:
        """Folder of the model folders that `headway reward-model` makes from this recipe."""
        name = (self.reward_model.name if self.reward_model else None) or self.name
        return self.deploy.runs_dir / f"{name}-rm"


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads, completes and validates a recipe.

    Args:
        recipe: Path of a TOML file, the name of a shipped one (`demo`), or of a preset, which
            stands for the demo's task and warm start under it.
        overrides: `key=value` with dotted keys; values are TOML, or else plain strings.

    Raises:
        InputError: Everything that is wrong with it, a line each.
    """
    document = _with_critic(with_preset(read_recipe(recipe, overrides)))
    try:
        return RunConfig.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        problems = "\n".join(explain(error, RunConfig))
        raise InputError(f"recipe {recipe}:\n{problems}") from None


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a recipe as they are written, neither completed nor validated.

    Args:
        recipe: See `load_recipe`.
        overrides: See `load_recipe`.

    Raises:
        InputError: It cannot be read, or an override has no key.
    """
    document = _read(recipe)
    for override in overrides:
        _override(document, override)
    return document


def _with_critic(document: dict[str, Any]) -> dict[str, Any]:
    """What [learner.critic] does not say of its optimizer is as in [learner]."""
    learner = document.get("learner")
    if not isinstance(learner, dict) or not isinstance(learner.get("critic"), dict):
        return document
    shared = {name: learner[name] for name in OptimizerConfig.model_fields if name in learner}
    return {**document, "learner": {**learner, "critic": {**shared, **learner["critic"]}}}


def _read(recipe: str) -> dict[str, Any]:
    path = Path(recipe)
    shipped = SHIPPED_RECIPES / f"{recipe}.toml"
    if not path.exists() and shipped.exists():
        path = shipped
    elif not path.exists() and recipe in preset_names():
        return on_demo(recipe, _read("demo"))
    if path.is_dir():
        raise InputError(f"recipe {recipe!r} is a folder and cannot be read; name a TOML file")
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        names = sorted(p.stem for p in SHIPPED_RECIPES.glob("*.toml")) + preset_names()
        close = difflib.get_close_matches(recipe, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"no recipe {recipe!r}: neither a file nor one of {', '.join(names)}{hint}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {recipe!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"recipe {recipe!r} is not TOML: {error}") from None


def _override(document: dict[str, Any], override: str) -> None:
    """Applies one `key=value` in place."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override!r}: write key=value, as in learner.learning_rate=1e-6")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.strip().split(".")
    if "\n" in text or not all((*sections, last)):
        raise InputError(f"--set {override!r}: write one key=value, the key's parts not empty")
    table = document
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {override!r}: {section!r} is a value, not a section")
    table[last] = value
