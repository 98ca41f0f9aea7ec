"""Cases that only a run can detect; it ends with exit code 1, or 2 where the input is at fault."""

from tests.deploy.broken import GIVES, MINE, Case, code, sets, source

SCORE = "def score(prompt, completion, answer, metadata): "
REWARD = "actors.reward=['mine:score']"

TOO_FEW_RESOURCES = sets("too few resources", "actors.cpus=640", "each with 640 CPU", "actors.cpus")


def scores(name: str, body: str, *words: str, settings: tuple[str, ...] = ()) -> Case:
    """Return a case whose reward has a body that fails."""
    chosen = [REWARD, *settings]
    return sets(name, chosen, "'mine:score'", *words, prepare=code(SCORE + body), code=1)


REWARD_RAISES = scores("reward raises", "raise KeyError('lost')", "raised KeyError('lost')")
SLOW_RUNS = [
    scores(
        "reward hangs",
        "import time; time.sleep(60)",
        "longer than 0.2 s",
        settings=("actors.reward_timeout_seconds=0.2",),
    ),
    scores("reward gives nan", "return float('nan')", "returned nan", "a finite number"),
    scores("reward gives text", "return 'good'", "returned 'good'", "a finite number"),
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
