"""`headway try`: what an episode looks like in print, and that every prompt is played."""

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.errors import RewardFailed
from deploy.config.loader import load_recipe
from deploy.offline.try_recipe import describe, try_recipe
from headway.errors import InputError
from queues.records import FinishReason, Prompt, Rollout, Segment
from tests.deploy.conftest import RECIPE

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROMPT = Prompt(prompt_id="sums/0/1", text="3+4=", answer="7")


class Letters:
    def decode(self, ids, **_):
        return "".join(chr(96 + token) for token in ids)


def test_segments_of_an_agent_are_told_apart_and_what_is_left_out_is_said():
    rollout = Rollout(
        sample_index=0, token_ids=[1, 2, 3, 4], prompt_length=1,
        loss_mask=[False, True, True, True], behavior_logprobs=[0.0, -0.5, -0.25, -0.125],
        versions=[-1, 0, 0, 0], reward=1.0, reward_parts={}, turns=2, environment="program:x",
        finish_reason=FinishReason.STOP, engine_id="engine-0", created_at=NOW, finished_at=NOW,
        segments=[Segment(3, 0, 1)], left_out={"undelivered": 5},
    )  # fmt: skip
    lines = describe(PROMPT, rollout, Letters(), {}).splitlines()
    assert lines[5:14] == [
        "[1:3] sampled, trains",
        "  text   'bc'",
        "  tokens [2, 3]",
        "  log-probabilities [-0.5, -0.25]",
        "segment 1: follows the first 1 tokens of segment 0",
        "[3:4] sampled, trains",
        "  text   'd'",
        "  tokens [4]",
        "  log-probabilities [-0.125]",
    ]
    assert lines[14] == "left out: 5 sampled tokens, undelivered"


def test_an_adapter_to_begin_with_is_refused():
    config = load_recipe("demo", ["learner.lora.path=mine", "learner.lora.rank=4"])
    with pytest.raises(InputError, match=r"learner\.lora\.path = '/.*mine': `headway try` plays"):
        try_recipe(config, None, 1, print)


def test_an_episode_is_printed_with_everything_that_it_consists_of():
    rollout = Rollout(
        sample_index=0, token_ids=[1, 2, 3, 4, 5, 6], prompt_length=2,
        loss_mask=[False, False, True, True, False, True],
        behavior_logprobs=[0.0, 0.0, -0.5, -0.25, 0.0, -1.0], versions=[-1, -1, 0, 0, -1, 0],
        reward=1.5, reward_parts={"exact_match": 1.0, "tags": 1.0}, turns=2, environment="tools",
        finish_reason=FinishReason.STOP, engine_id="engine-0", created_at=NOW,
        finished_at=NOW + timedelta(seconds=1.25),
    )  # fmt: skip
    assert describe(PROMPT, rollout, Letters(), {"tags": 0.5}).splitlines()[1:] == [
        "answer '7'",
        "[0:2] given, does not train",
        "  text   'ab'",
        "  tokens [1, 2]",
        "[2:4] sampled, trains",
        "  text   'cd'",
        "  tokens [3, 4]",
        "  log-probabilities [-0.5, -0.25]",
        "[4:5] given, does not train",
        "  text   'e'",
        "  tokens [5]",
        "[5:6] sampled, trains",
        "  text   'f'",
        "  tokens [6]",
        "  log-probabilities [-1.0]",
        "reward 1.5",
        "  exact_match 1",
        "  tags 1 × 0.5",
        "ended by stop after 3 sampled tokens, 2 turns, 1.25 s",
    ]


def test_a_failure_is_printed_with_its_reason():
    text = describe(PROMPT, RewardFailed("reward 'x' took longer than 3 s"), Letters(), {})
    assert "FAILED (reward): reward 'x' took longer than 3 s" in text


@pytest.fixture
def classifier(tmp_path, tiny_model):
    """Build a reward model of random weights with the tiny model's tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    folder = tmp_path / "judge"
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    config = Qwen3Config.from_pretrained(tiny_model, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.deepspeed
def test_prompts_are_played_and_scored_by_all_rewards_and_nothing_is_written(headway, classifier):
    settings = (
        "name=tried", "actors.reward=['last_answer', 'tags', 'reward_model']",
        "actors.reward_model.standardise=false", f"actors.reward_model.paths=['{classifier}']",
    )  # fmt: skip
    runs = {path.name for path in (headway.folder / "runs").iterdir()}
    result = headway.call(*headway.arguments("try", *settings)[1:], "--prompts", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("sampled, trains") == 2
    for reward in ("last_answer", "tags", "reward_model"):
        assert result.stdout.count(f"  {reward} ") == 2
    assert {path.name for path in (headway.folder / "runs").iterdir()} == runs


ON_VLLM = ("name=real", "actors.engine=vllm", "actors.cores=['0']", "heldout.size=1")


def recipe_without_memory(headway):
    """Write the small recipe without the size of the KV cache, as a newcomer would."""
    text = RECIPE.read_text().replace("kv_cache_gib = 1\n", "")
    assert "kv_cache" not in text
    (headway.folder / "plain.toml").write_text(text)
    return "plain.toml", *(part for setting in ON_VLLM for part in ("--set", setting))


def logs():
    return set(Path(tempfile.gettempdir()).glob("headway-engine-*.log"))


@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_recipe_without_memory_settings_is_played_and_vllm_is_not_heard(headway):
    before = logs()
    result = headway("try", *recipe_without_memory(headway), "--prompts", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("sampled, trains") == 2
    assert result.stderr == ""
    *lines, next_command = result.stdout.splitlines()
    assert next_command.startswith("go on with: headway run")
    assert not [line for line in lines if "vllm" in line.lower()]
    assert logs() == before


@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "message"),
    [
        ("100000", "the KV cache of an engine takes 100000.0 GiB, and "),
        ("0.00005", "one rollout of actors.max_model_len = 256 tokens needs "),
    ],
)
def test_memory_that_does_not_suffice_is_one_message_in_keys_of_the_recipe(headway, gib, message):
    arguments = recipe_without_memory(headway)
    result = headway("try", *arguments, "--set", f"actors.kv_cache_gib={gib}")
    assert result.returncode == 2, result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert message in line
    assert "actors.kv_cache_gib" in line
    assert len(result.stdout.splitlines()) == 1
