"""Settings with which a run that does not fit into memory fits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.planner.memory import Capacity, Lack, Prediction, predict
from deploy.planner.model_sizes import Sizes
from headway.errors import InputError

MOST_CHANGES = 8
"""Settings that are changed one after the other before it is given up."""


def remedies(
    config: RunConfig, role: str, longest: int, workers: Sequence[int], gpus: int = 0
) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """Yield settings that lower the memory of a role, the cheapest first, each with the recipe.

    `workers` are the values that `actors.tensor_parallel_size` may have, `gpus` the number of a
    node's.
    """
    learner, actors = config.learner, config.actors
    share, most = actors.gpu_memory_share, 0.9 * (actors.gpus if 0 < actors.gpus < 1 else 1.0)
    shards = learner.zero_stage > 0 and learner.optimizer == "adamw"
    less = [
        (actors.gpus > 0, "actors", {"gpu_memory_utilization": round(part * share, 3)})
        for part in (0.75, 0.5)
    ]
    options: dict[str, list[tuple[bool, str, dict[str, Any]]]] = {
        "learner": [
            (not learner.activation_checkpointing, "learner", {"activation_checkpointing": True}),
            *(
                (tokens >= longest, "learner", {"microbatch_tokens": tokens})
                for tokens in (learner.microbatch_tokens // part for part in (2, 4, 8))
            ),
            (
                shards and learner.ranks > 1 and learner.zero_stage < 3,
                "learner",
                {"zero_stage": learner.zero_stage + 1},
            ),
            *(
                (shards and learner.gpus == 1 and ranks <= gpus, "learner", {"ranks": ranks})
                for ranks in (2 * learner.ranks, 4 * learner.ranks)
            ),
            (
                shards and learner.gpus > 0,
                "learner",
                {"offload_optimizer": not learner.offload_optimizer},
            ),
            *less,
        ],
        "actor": [
            *(
                (
                    actors.gpus > 0 and share < more <= most,
                    "actors",
                    {"gpu_memory_utilization": round(more, 3)},
                )
                for more in (most, 2 * share, 1.5 * share, 1.25 * share)
            ),
            *less,
            *(
                (actors.gpus > 0, "actors", {"tensor_parallel_size": size, "gpus": float(size)})
                for size in workers
                if size != actors.gpus
            ),
            (not actors.gpus, "actors", {"kv_cache_gib": 1.0}),
            (actors.count > 1, "actors", {"count": actors.count // 2}),
        ],
    }
    for applies, section, settings in options[role]:
        if applies:
            changed = getattr(config, section).model_copy(update=settings)
            named = {f"{section}.{name}": value for name, value in settings.items()}
            yield named, config.model_copy(update={section: changed})


def _excess(lacks: Sequence[Lack]) -> float:
    return sum(lack.excess for lack in lacks)


def refuse(
    config: RunConfig,
    prediction: Prediction,
    measure: Callable[[RunConfig], Sizes],
    capacity: Capacity,
    longest: int,
) -> None:
    """Refuse a run that cannot fit, naming settings with which it does.

    For what lacks first, each setting is tried alone; if none is enough, the best one is kept.

    Raises:
        InputError: It cannot fit.
    """
    if not prediction.lacks:
        return
    lacks = prediction.lacks
    settings: dict[str, Any] = {}
    texts = [lack.text for lack in lacks]
    for _ in range(MOST_CHANGES):
        role = lacks[0].role
        tried = [
            (more, changed, predict(changed, measure(changed), capacity).lacks)
            for more, changed in remedies(
                config, role, longest, measure(config).served.workers, capacity.gpus or 0
            )
        ]
        others = {lack.role for lack in lacks} - {role}
        enough = [option for option in tried if {lack.role for lack in option[2]} <= others]
        best = min(tried, key=lambda option: _excess(option[2]), default=None)
        if best is None or (not enough and _excess(best[2]) >= _excess(lacks)):
            break
        more, config, lacks = enough[0] if enough else best
        settings |= more
        if not lacks:
            break
    named = ", ".join(f"{name} = {toml_value(value)}" for name, value in settings.items())
    help_ = f"set {named}, with which it fits"
    if lacks:
        help_ = "no setting that was tried helps: take more or larger GPUs, or a smaller model"
    raise InputError("\n".join(["the run does not fit into memory:", *texts, help_]))
