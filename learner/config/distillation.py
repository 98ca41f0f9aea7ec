"""Settings of on-policy distillation: the section `[learner.distillation]` of a recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.recipe_section import Section
from learner.config.option_types import ModelName


class TeacherConfig(Section):
    """A teacher: an entry of the list `teachers`."""

    path: ModelName
    """Model folder or hub name, of any size, with the tokenizer of the policy."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of its divergence in the mean over the teachers of a prompt."""
    prompts: tuple[str, ...] = ()
    """Beginnings of the ids of the prompts that it teaches, such as "math:" for the part named math
    of a mixture; empty: all."""


class DistillationConfig(Section):
    """Divergence from teachers, frozen models that score what the policy sampled."""

    teachers: tuple[TeacherConfig, ...] = Field(min_length=1)
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the divergence in the loss."""
    policy_loss: float = Field(default=1.0, ge=0)
    """Weight of the policy loss beside it; 0 is distillation alone, whatever rewards say."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """KL(policy ‖ teacher), KL(teacher ‖ policy), or the generalised Jensen-Shannon divergence."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Share of the teacher in the mixture that `jsd` compares both with."""
    top_k: int = Field(default=64, ge=0)
    """Likeliest words of the teacher whose probabilities are compared one by one, and the rest as
    one more; as many as the vocabulary compare whole distributions. 0: the sampled token alone."""

    def shares(self, prompt_id: str) -> list[float]:
        """Return each teacher's share in the mean for a prompt, all 0 where none teaches it."""
        weights = [
            0.0 if teacher.prompts and not prompt_id.startswith(teacher.prompts) else teacher.weight
            for teacher in self.teachers
        ]
        return [weight / (sum(weights) or 1.0) for weight in weights]

    @model_validator(mode="after")
    def _teachers_differ(self) -> Self:
        paths = [teacher.path for teacher in self.teachers]
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise ValueError(
                f"teachers has {', '.join(twice)} more than once; name each once, with one weight"
            )
        return self

    @model_validator(mode="after")
    def _distributions_are_known(self) -> Self:
        if self.top_k == 0 and self.divergence != "reverse_kl":
            raise ValueError(
                f'divergence = "{self.divergence}" with top_k = 0: the sampled token alone tells '
                'the reverse KL only; set top_k to 1 or more, or divergence = "reverse_kl"'
            )
        return self
