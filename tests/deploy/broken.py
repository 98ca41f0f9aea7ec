"""Cases of bad input: a recipe, the files next to it, and the words of the expected message."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.storage.run_directory import RunDirectory
from tests.deploy.trained import train

RECIPE = """
name = "bad"
steps = 3
[model]
path = "model"
[prompts]
source = "lettered_chain_sum"
groups_per_batch = 2
group_size = 2
[actors]
engine = "scripted"
reward = ["last_answer"]
max_new_tokens = 24
max_concurrent_rollouts = 8
[queues]
max_attempts = 1
[learner]
microbatch_tokens = 128
[deploy]
max_failed_groups = 0
"""
SFT = """
name = "bad"
steps = 3
[model.tiny]
characters = "0123456789+-=,abcdefghijklmnopqr"
context = 32
[prompts]
source = "lettered_chain_sum"
[actors]
reward = ["last_answer"]
[sft]
demonstrations = "pairs.jsonl"
"""


def writes(name: str, text: str) -> Callable[[Path], None]:
    """Write a file into the folder that the command runs in."""
    return lambda folder: (folder / name).write_text(text) and None


def code(text: str) -> Callable[[Path], None]:
    """Write a module of the user's; names that it registers stay taken in this process."""
    return writes("mine.py", text)


def registered(decorator: str, function: str) -> Callable[[Path], None]:
    """Write a module with a function that a decorator of `learner` registers under a new name."""
    return code(
        "from uuid import uuid4\n"
        "from learner.advantages import advantage\n"
        "from learner.losses import TokenLoss, policy_loss_function\n"
        f"@{decorator.replace('(', '(str(uuid4()), ', 1)}\n{function}"
    )


def rows(name: str, *values: object) -> Callable[[Path], None]:
    """Write a file of JSON lines; strings are lines as they are."""
    lines = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    return writes(name, "\n".join(lines))


def model(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Change the model folder."""
    return lambda folder: change(folder / "model") and None


def description(**keys: object) -> Callable[[Path], None]:
    """Change keys of the model's config.json."""

    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))

    return change


def tokenizer(**keys: object) -> Callable[[Path], None]:
    """Change keys of the model's tokenizer_config.json; None removes a key."""

    def change(folder: Path) -> None:
        file = folder / "model" / "tokenizer_config.json"
        kept = {**json.loads(file.read_text()), **keys}
        file.write_text(json.dumps({k: v for k, v in kept.items() if v is not None}))
        (folder / "model" / "special_tokens_map.json").unlink(missing_ok=True)

    return change


def transformers_model(kind: str, **sizes: object) -> Callable[[Path], None]:
    """Replace the model by a real one of another architecture, with random weights."""

    def change(folder: Path) -> None:
        import transformers

        built = getattr(transformers, f"{kind}Config")(vocab_size=64, hidden_size=32, **sizes)
        name = built.architectures[0] if built.architectures else ""
        head = {"Bert": "BertForMaskedLM"}.get(kind, name or f"{kind}ForCausalLM")
        kept = folder / "model"
        getattr(transformers, head)(built).save_pretrained(kept)

    return change


def existing_run(folder: Path) -> None:
    """Make a run of the same name that has trained."""
    run = RunDirectory(folder / "runs" / "bad")
    run.path.mkdir(parents=True)
    run.recipe_file.write_text("")
    (run.path / "driver.lock").touch()
    train(run, [{}, {}])


def run_going_on(folder: Path) -> None:
    """Make a run of the same name whose broker is alive."""
    from queues.storage.ledger_schema import LOCK_NAME

    existing_run(folder)
    lock = (folder / "runs" / "bad" / LOCK_NAME).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    HELD.append(lock)


HELD: list[object] = []
"""Locks of runs that are alive; the test closes them after the case."""

SOURCE = """
import json
from queues.records import Prompt
class Source:
    def __init__(self, **keywords): self.i = 0; {init}
    def next(self, count): {next}
    def cursor(self): return json.dumps(self.i)
    def restore(self, cursor): self.i = json.loads(cursor)
"""
GIVES = (
    "self.i += count; "
    "return [Prompt(prompt_id=str(i), text='a3=', answer='3') for i in range(count)]"
)
FILES = ["prompts.source=files", "prompts.source_options={path='data.jsonl'}"]
MINE = ["prompts.source=mine:Source"]


def source(init: str = "pass", gives: str = GIVES) -> Callable[[Path], None]:
    """Write a prompt source of the user's."""
    return code(SOURCE.format(init=init, next=gives))


@dataclass(frozen=True)
class Case:
    """One case of bad input."""

    name: str
    words: list[str]
    """Words that the message must contain."""
    settings: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    command: str = "run"
    recipe: str = RECIPE
    code: int = 2


def sets(name: str, settings: str | list[str], *words: str, **more: object) -> Case:
    """Return a case whose settings of `--set` are refused."""
    chosen = (settings,) if isinstance(settings, str) else tuple(settings)
    return Case(name, list(words), chosen, **more)  # type: ignore[arg-type]
