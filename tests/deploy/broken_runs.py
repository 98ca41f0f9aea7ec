"""Cases that only a run can detect; it ends with exit code 1, or 2 where the input is at fault."""

from tests.deploy.broken import GIVES, MINE, code, sets, source

SCORE = "def score(prompt, completion, answer, metadata): "
REWARD = "actors.reward=['mine:score']"

TOO_FEW_RESOURCES = sets("too few resources", "actors.cpus=640", "each with 640 CPU", "actors.cpus")
REWARD_RAISES = sets(
    "reward raises",
    REWARD,
    "'mine:score'",
    "raised KeyError('lost')",
    prepare=code(SCORE + "raise KeyError('lost')"),
    code=1,
)
SLOW_RUNS = [
    sets(
        "reward hangs",
        [REWARD, "actors.reward_timeout_seconds=0.2"],
        "'mine:score'",
        "longer than 0.2 s",
        prepare=code("import time\n" + SCORE + "time.sleep(60)"),
        code=1,
    ),
    sets(
        "reward gives nan",
        REWARD,
        "'mine:score'",
        "returned nan",
        "a finite number",
        prepare=code(SCORE + "return float('nan')"),
        code=1,
    ),
    sets(
        "reward gives text",
        REWARD,
        "'mine:score'",
        "returned 'good'",
        "a finite number",
        prepare=code(SCORE + "return 'good'"),
        code=1,
    ),
    sets(
        "environment raises",
        "actors.environment=mine:World",
        "KeyError('lost')",
        prepare=code(
            "class World:\n  def __init__(self): raise KeyError('lost')\n"
            "  def reset(self, prompt): 0\n  def step(self, message): 0"
        ),
        code=1,
    ),
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
        "long prompt later",
        [*MINE, "steps=500"],
        "300 tokens",
        "from 1 to 255",
        prepare=source(gives=GIVES.replace("'a3='", "'a' * 300 if self.i > 20 else 'a3='")),
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
