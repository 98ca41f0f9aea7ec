"""The top-level keys and the sections of a recipe."""

from typing import Annotated

from pydantic import Field

from actors.config import ISSUED, SAMPLED, ActorsConfig, HeldoutConfig, PromptsConfig
from deploy.config.deploy_config import DeployConfig
from deploy.config.pairs import PairsConfig
from headway.recipe_section import ResumeRule, Section
from learner.config.learner import LearnerConfig, ModelConfig
from learner.config.supervised import PreferConfig, RewardTrainingConfig, SftConfig
from queues.config import QueuesConfig
from weight_sync.config import WeightSyncConfig

BEGINNING = ResumeRule(
    "the weights of the run began with it; `headway export` makes a model folder of its newest, "
    "which a run of its own can begin with"
)


class RecipeKeys(Section):
    """The keys of a recipe; `RunConfig` adds the rules between them."""

    name: Annotated[
        str,
        ResumeRule("it is the name of the run's folder; start a run of its own under another name"),
    ] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run and of its folder."""
    preset: Annotated[
        str | None,
        ResumeRule(
            "a preset fills in what a recipe leaves out, and the recipe of a run is complete"
        ),
    ] = None
    """The algorithm under a name; it fills in what the recipe does not say. `headway presets` lists
    them."""
    seed: Annotated[int, ISSUED] = Field(default=0, ge=0, le=10**8)
    """Seed of prompts, sampling, warm starts and the order of everything random."""
    steps: Annotated[
        int,
        ResumeRule(lowering_refusal="a run can be made longer, and stopped at any step by Ctrl-C"),
    ] = Field(ge=1)
    """Batches to train, which is also the number of published versions after the initial one."""
    model: Annotated[ModelConfig, BEGINNING]
    prompts: PromptsConfig
    actors: ActorsConfig = ActorsConfig()
    queues: QueuesConfig = QueuesConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    heldout: HeldoutConfig | None = None
    sft: Annotated[SftConfig | None, BEGINNING] = None
    prefer: Annotated[PreferConfig | None, BEGINNING] = None
    reward_model: Annotated[RewardTrainingConfig | None, SAMPLED] = None
    pairs: PairsConfig | None = None
    deploy: DeployConfig = DeployConfig()
