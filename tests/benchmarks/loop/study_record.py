"""Made-up records of the study of staleness, whose figures follow simple rules."""

from math import exp

CORRECTIONS = {
    "none": {"loss": "reinforce"},
    "tis": {"loss": "reinforce", "correction": "tis"},
}


def run(bound, correction, seed, *, gain=0.4, steps=100):
    """Return the figures of a run: the larger the bound, the faster, staler and worse."""
    eta = {"inf": 16, "auto": 4}.get(bound) or int(bound)
    seconds = steps * (1.0 + 1.0 / (1 + eta)) + seed
    loss = (0.3 if correction == "none" else 0.01) * eta / 8 * (1 + seed % 3) / 2
    versions = [0, 25, 50, 75, 100]
    scores = [0.3 + (gain - (loss if step else 0)) * (1 - exp(-step / 30)) for step in versions]
    lags = {"0": 1.0} if not eta else {"0": 0.25, str(eta // 2 or 1): 0.25, str(eta): 0.5}
    if eta == 1:
        lags = {"0": 0.5, "1": 0.5}
    return {
        "kind": correction, "name": bound, "seed": seed,
        "environment": {
            "code": "code", "commit": "c0ffee", "machine": {"load_average": [0.5]},
        },
        "batches": 70, "samples_per_second": 128 * steps / seconds, "tokens_per_rollout": 40.0,
        "learner_idle": 0.5 / (1 + eta), "actors_idle": 0.4 / (1 + eta) + 0.02, "pauses": 0.01,
        "lag_mean": sum(int(lag) * share for lag, share in lags.items()), "lag_max": eta,
        "windows": [8] * 35 + [4] * 35 if bound == "auto" else [],
        "lags": lags, "groups_in_engines": 16.0 * (1 + eta / 2), "groups_ready": 8.0 * eta,
        "ess": 1 - eta / 100, "kl": 1e-3 * eta, "cut": 0.001 * eta,
        "score": scores[-1], "versions": versions, "scored": [500, 500, 500, 500, 2000],
        "curve": [[seconds * v / steps, score] for v, score in zip(versions, scores, strict=True)],
        "heldout": {"scored": 2000, "failed": 0},
        "simulated": 128 * steps / seconds * (1.02 if eta else 0.9), "predicted_lag": 0.9 * eta,
    }  # fmt: skip


def record(
    *, bounds=("0", "2", "8"), corrections=("none",), seeds=(0, 1, 2), of_first=(), **changes
):
    """Return a record of bounds with `cispo`, and of corrections at η = 8.

    `of_first` are further pairs of bound and correction, of the first seed; `changes` are other
    values of the record.
    """
    cells = [*((bound, "cispo") for bound in bounds), *(("8", name) for name in corrections)]
    arms = [run(*cell, seed) for seed in seeds for cell in cells]
    arms += [run(*cell, seeds[0]) for cell in of_first]
    return {
        "command": "headway bench staleness my.toml", "commit": "c0ffee", "code": "code",
        "time": "2026-11-28T12:00:00+00:00", "uncommitted_changes": False,
        "machine": {"cpu": "a processor", "cores": 2, "load_average": [0.5, 0.5, 0.5]},
        "recipe": "my.toml", "settings": [], "steps": 100, "devices": "cores: 0 · 1",
        "recipe_key": "recipe", "own": "cispo", "stale": 8, "reference": "2", "score_every": 25,
        "batch": [16, 8], "heldout": 500, "problems": 2000, "target": None,
        "corrections": {name: CORRECTIONS[name] for name in corrections if name in CORRECTIONS},
        "arms": arms, "failed": [], **changes,
    }  # fmt: skip
