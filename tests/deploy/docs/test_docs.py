"""What the page on tasks tells people to write can be read and does what it says."""

import json
import textwrap
import tomllib
from pathlib import Path

import pytest

from actors.config import ActorsConfig, HeldoutConfig, PromptsConfig
from actors.environments.protocol import Message
from actors.rewards import load_rewards
from deploy.config.loader import load_recipe
from queues.records import Prompt

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()


def blocks():
    """The indented blocks of the page."""
    found, lines = [], []
    for line in [*PAGE.split("\n"), "end"]:
        if line.startswith("    ") or (lines and not line):
            lines.append(line)
        elif lines:
            found.append(textwrap.dedent("\n".join(lines)).strip() + "\n")
            lines = []
    return found


def block(start):
    [found] = [text for text in blocks() if text.startswith(start)]
    return found


def test_the_ten_lines_are_ten_and_a_recipe(tmp_path, monkeypatch):
    text = block('name = "mine"')
    assert len(text.splitlines()) <= 10
    (tmp_path / "my_task.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_recipe("my_task.toml", [])
    assert config.actors.reward == ("my_task:score",)
    assert json.loads(block('{"prompt"')) == {"prompt": "12*34=", "answer": "408"}


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


@pytest.mark.parametrize(
    ("start", "section", "model"),
    [
        ('[actors]\nreward = ["math_verify"]', "prompts", PromptsConfig),
        ('[prompts]\nsource = "verifiers', "prompts", PromptsConfig),
        ('[prompts]\nsource = "verifiers', "actors", ActorsConfig),
        ("[heldout]\nsize", "heldout", HeldoutConfig),
        ("[heldout]\npinned", "heldout", HeldoutConfig),
        ('[actors]\nreward = ["llm_judge"]', "actors", ActorsConfig),
        ('[actors]\nenvironment = "tools"', "actors", ActorsConfig),
    ],
)
def test_every_section_of_the_page_is_valid(start, section, model):
    read = tomllib.loads(block(start))[section]
    config = model(**read)
    if "llm_judge" in read.get("reward", ()):
        load_rewards(config.reward, options=config.reward_options)
