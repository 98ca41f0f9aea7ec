"""Section `[deploy.placement]`: on which nodes of a cluster the roles of a run work."""

from pydantic import BaseModel, ConfigDict, Field

SECTION = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)


class Placement(BaseModel):
    """The nodes of one role."""

    model_config = SECTION

    labels: dict[str, str] = {}
    """Labels that a node must have, as given to `ray start --labels`. Ray itself labels nodes with
    "ray.io/accelerator-type"."""
    resources: dict[str, float] = {}
    """Custom resources that each process reserves, as given to `ray start --resources`; CPUs and
    GPUs are settings of the role."""


class Placements(BaseModel):
    """By role; one that is left out stays at the driver, or is spread where it may be anywhere."""

    model_config = SECTION

    learner: Placement | None = Field(default=None)
    """On other nodes than the driver's, the run's folder must be on a disk that they share."""
    actors: Placement | None = Field(default=None)
    reward_model: Placement | None = Field(default=None)
