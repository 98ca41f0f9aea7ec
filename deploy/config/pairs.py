"""Settings of preferences that a model makes: the section [pairs] of a recipe."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from actors.config import RewardNames
from headway.recipe_section import MAY_CHANGE, Section


class PairsConfig(Section):
    """Preferences between answers of the policy, which a model compares: `headway pairs RECIPE`."""

    on_resume = MAY_CHANGE

    prompts: int = Field(default=500, ge=1)
    """Prompts that are answered; none of them is held out."""
    samples: int = Field(default=4, ge=2)
    """Answers of each prompt, sampled as in training; every two of them are compared."""
    judge: dict[str, Any] = Field(default={})
    """Options of the reward llm_judge, with which it compares two answers, asked with each of them
    first: n(n − 1) calls for n samples. `instruction` asks for pairs by default."""
    principles: tuple[Annotated[str, Field(pattern=r"\S")], ...] | str = ()
    """Texts by which the judge compares, or a file with one a line. Each comparison draws one, by
    the seed and what it compares."""
    rewards: Annotated[RewardNames, Field(min_length=1)] | None = None
    """Rewards that compare in place of a judge, as ["reward_model"], in the form of actors.reward,
    with options and weights of the same; what the environment gives is added."""
    margin: float = Field(default=0.0, ge=0)
    """Smallest difference between the rewards of a pair; equal ones make none."""
    choose: Literal["extremes", "adjacent"] = "extremes"
    """Pairs of a prompt whose answers are ranked by the comparisons that they win, less those that
    they lose: the one of the furthest ranks that a comparison decides, or all decided pairs of
    neighbours."""

    @model_validator(mode="after")
    def _one_of_them_compares(self) -> Self:
        if bool(self.judge) == bool(self.rewards):
            raise ValueError(
                f"{'both judge and rewards are' if self.judge else 'neither judge nor rewards is'} "
                'given; set one, which compares answers: judge = { url = "http://host:8000/v1", '
                'model = "…" } with principles, or rewards = ["reward_model"]'
            )
        if (self.rewards and self.principles) or (self.judge and self.margin):
            raise ValueError("principles are for judge alone, and margin for rewards; leave it out")
        return self
