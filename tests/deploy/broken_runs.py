"""Cases that only a run can detect; it ends with exit code 1, or 2 where the input is at fault."""

from tests.deploy.broken import GIVES, MINE, code, sets, source

TOO_FEW_RESOURCES = sets("too few resources", "actors.cpus=640", "each with 640 CPU", "actors.cpus")
REWARD_RAISES = sets(
    "reward raises",
    "actors.reward=['mine:score']",
    "'mine:score'",
    "raised KeyError('lost')",
    prepare=code("def score(prompt, completion, answer, metadata): raise KeyError('lost')"),
    code=1,
)
SLOW_RUNS = [
    sets(
        "source raises later",
        [*MINE, "steps=500"],
        "feeder",
        "raised KeyError('later')",
        prepare=source(
            gives=GIVES.replace(
                "self.i += count", "self.i += count; x = {}['later'] if self.i > 20 else 0"
            )
        ),
        code=1,
    ),
    sets(
        "foreign character later",
        [*MINE, "steps=500"],
        "no token for '€'",
        prepare=source(gives=GIVES.replace("'a3='", "'€' if self.i > 20 else 'a3='")),
        code=1,
    ),
]
