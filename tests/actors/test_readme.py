"""The blocks on the pages of `actors` run, and their tables are those of the registry."""

import json
import re
import tomllib

import pytest

from actors.config import ActorsConfig
from actors.environments.protocol import Message
from actors.rewards.rewards import load_rewards
from actors.shipped import ENVIRONMENTS, REWARDS, SOURCES, TOOLS
from actors.sources.examples import DEMONSTRATIONS, load_examples
from deploy.config.loader import load_recipe
from queues.records import Prompt
from tests.test_pages import PRESENT, ROOT, blocks_of, text_of

PAGES = [name for name in PRESENT if name.startswith("actors/")]


def block(start):
    """Return the block of a page that starts with a text."""
    blocks = [block.strip() + "\n" for name in PAGES for block in blocks_of(name)]
    [matching] = [text for text in blocks if text.startswith(start)]
    return matching


def test_the_ten_lines_are_ten_and_a_recipe(tmp_path, monkeypatch):
    text = block('name = "mine"')
    assert len(text.splitlines()) <= 10
    (tmp_path / "my_task.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_recipe("my_task.toml", [])
    assert config.actors.reward == ("my_task:score",)
    assert json.loads(block('{"prompt"')) == {"prompt": "12*34=", "answer": "408"}


def test_the_demonstrations_of_the_page_can_be_learned(tmp_path):
    (tmp_path / "talks.jsonl").write_text(block('{"messages"'))
    path = str(tmp_path / "talks.jsonl")
    read = load_examples(DEMONSTRATIONS, path, options={}, seed=0, heldout=frozenset())
    ask, answer = Message("user", "12*34="), Message("assistant", "=408")
    examples = [next(read), next(read)]
    assert ("12*34=", "=408") in examples
    assert ((ask,), (answer,)) in examples


def test_the_function_and_the_environment_do_what_they_are_for():
    space = {}
    exec(block("def score"), space)
    assert space["score"]("12*34=", "=408", "408", {}) == 1.0
    assert space["score"]("12*34=", "=4080", "408", {}) == 0.0
    exec(block("from actors.environments"), space)
    environment = space["Calculator"]()
    assert environment.reset(Prompt(prompt_id="p", text="12*34=")) == [Message("user", "12*34=")]
    turn = environment.step(Message("assistant", "[12*34]"))
    assert (turn.messages, turn.reward, turn.done) == ([Message("tool", "408")], 0.1, False)
    assert environment.step(Message("assistant", "=408")).done


def test_the_judge_of_the_page_can_be_loaded():
    config = ActorsConfig(**tomllib.loads(block('[actors]\nreward = ["llm_judge"]'))["actors"])
    load_rewards(config.reward, options=config.reward_options)


@pytest.mark.parametrize(
    ("heading", "registry"),
    [
        ("`prompts.source`", SOURCES),
        ("`actors.reward`", REWARDS),
        ("`actors.environment`", ENVIRONMENTS),
        ("tool", TOOLS),
    ],
)
def test_a_table_describes_every_name_of_the_registry(heading, registry):
    text = "\n".join(map(text_of, PAGES))
    table = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = table.split("\n")[2:]
    described = [re.fullmatch(r"\| `(.+?)` \| .+ \|", row)[1] for row in rows]
    assert described == [*registry]


@pytest.mark.parametrize(
    "target",
    [
        registry[name].target
        for registry in (SOURCES, REWARDS, ENVIRONMENTS, TOOLS)
        for name in registry
    ],
)
def test_every_entry_of_the_registry_can_be_found_in_its_module(target):
    module, _, attribute = target.partition(":")
    path = ROOT / f"{module.replace('.', '/')}.py"
    assert re.search(rf"^(async def|def|class) {attribute}\b", path.read_text(), re.MULTILINE)
