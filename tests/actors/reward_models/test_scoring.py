"""Reward models: a text has one score, whatever shares its batch; how several become one."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from characters import TEMPLATE
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from reward_model_folders import build_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.config import ActorsConfig, RewardModelConfig
from actors.environments.protocol import Message
from actors.errors import PromptRefused
from actors.reward_models.folder import Scale
from actors.reward_models.scoring import Member, combine, load_reward_models
from actors.rewards.rewards import load_rewards
from headway.errors import InputError
from queues.records import Prompt

TEXTS = [("1+2=", "3"), ("a1b+2=", "b1+2=3"), ("5-5=", "0"), ("9+9+9=", "9+9=18,18+9=27")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two reward models that differ in weights and scale."""
    root = tmp_path_factory.mktemp("judges")
    return [
        build_classifier(root / "0", seed=0),
        build_classifier(root / "1", seed=1, scale=Scale(-3.0, 0.25)),
    ]


def member(folder, **options):
    return Member(folder, RewardModelConfig(**{"standardise": False, **options}))


def scores(models, texts):
    async def ask():
        return await asyncio.gather(*(models.score(*text) for text in texts))

    return asyncio.run(asyncio.wait_for(ask(), 60))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("min", [1.0, -4.0]),
        ("mean", [2.0, 0.0]),
        ("uwo", [2.0 - 0.25 * 2 / 3, 0.0 - 0.25 * 32 / 3]),
    ],
)
def test_members_are_combined_as_the_formula_says(how, expected):
    result = combine(torch.tensor([[1.0, -4.0], [2.0, 0.0], [3.0, 4.0]]), how, uncertainty=0.25)
    assert result.tolist() == pytest.approx(expected)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=5), st.floats(0, 3))
def test_a_cautious_combination_is_never_above_the_mean(values, uncertainty):
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    mean = combine(column, "mean")
    assert combine(column, "min") <= mean + 1e-9
    assert combine(column, "uwo", uncertainty=uncertainty) <= mean + 1e-9
    assert combine(column, "uwo", uncertainty=0.0) == mean


def test_a_score_does_not_depend_on_its_batch(folders):
    judge = member(folders[0])
    texts = [judge.read(*text) for text in TEXTS]
    together = judge.score(texts)
    alone = torch.cat([judge.score([text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert together.std() > 0.1


def test_a_score_is_what_transformers_says_of_the_text_closed_by_eos(folders):
    judge = member(folders[0])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForSequenceClassification.from_pretrained(folders[0]).eval()
    batch = tokenizer(
        [f"{prompt}{completion}{tokenizer.eos_token}" for prompt, completion in TEXTS],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits[:, 0]
    result = judge.score([judge.read(*text) for text in TEXTS])
    torch.testing.assert_close(result, expected.double(), rtol=0, atol=1e-5)


def test_a_chat_template_writes_the_text_where_there_is_one(tmp_path):
    judge = member(build_classifier(tmp_path, template=TEMPLATE))
    written = AutoTokenizer.from_pretrained(str(tmp_path)).decode(judge.read("1+2=", "3"))
    assert written == "user:1+2=<eos>\nassistant:3<eos>\n"


def test_the_last_token_of_a_text_counts_even_where_it_is_what_pads(tmp_path):
    build_classifier(tmp_path, pad=1)  # the id of eos
    judge = member(str(tmp_path))
    texts = [judge.read(*text) for text in TEXTS]
    alone = torch.cat([judge.score([text]) for text in texts])
    torch.testing.assert_close(judge.score(texts), alone, rtol=0, atol=1e-5)
    cut = torch.cat([judge.score([text[:-1]]) for text in texts])
    assert (alone - cut).abs().min() > 1e-3


def test_standardised_scores_have_the_folders_mean_and_deviation_taken_out(folders):
    plain, standard = (member(folders[1], standardise=s) for s in (False, True))
    texts = [plain.read(*text) for text in TEXTS]
    expected = (plain.score(texts) + 3.0) / 0.25
    torch.testing.assert_close(standard.score(texts), expected)


@pytest.mark.parametrize("how", ["min", "mean", "uwo"])
def test_several_models_are_standardised_and_then_combined(folders, how):
    config = RewardModelConfig(combine=how, uncertainty=0.5, batch_size=3, max_wait_ms=1.0)
    result = scores(load_reward_models(folders, config), TEXTS)
    members = [member(folder, standardise=True) for folder in folders]
    scored = torch.stack([m.score([m.read(*text) for text in TEXTS]) for m in members])
    assert result == pytest.approx(combine(scored, how, uncertainty=0.5).tolist(), rel=1e-5)


def test_each_kind_is_combined_by_itself_and_is_a_part_with_a_weight(folders):
    kinds = {"helpful": folders[1:], "safe": folders}
    config = RewardModelConfig(kinds=kinds, combine="mean")
    weights = {"reward_model": 2.0, "reward_model/safe": 0.5}
    judge = load_reward_models(config.named, config)
    rewards = load_rewards(["reward_model"], weights=weights, reward_model_client=judge)
    prompts = [Prompt(prompt_id="p", text=text) for text, _ in TEXTS]

    async def score_all():
        return await asyncio.gather(*map(rewards.score, prompts, [text for _, text in TEXTS]))

    for text, (total, parts, _) in zip(TEXTS, asyncio.run(score_all()), strict=True):
        alone = [member(f, standardise=True) for f in folders]
        first, second = (float(m.score([m.read(*text)])) for m in alone)
        expected = {"reward_model/helpful": second, "reward_model/safe": (first + second) / 2}
        assert parts == pytest.approx(expected, abs=1e-5)
        assert total == pytest.approx(2 * second + (first + second) / 2, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_model": {"paths": ["a"], "kinds": {"b": ["b"]}}}, "either paths or kinds"),
        ({"reward_model": {"kinds": {"b": []}}}, "at least 1 item"),
        ({"reward_weights": {"reward_mode/b": 1.0}}, "names reward_mode/b, which is no reward"),
        (
            {
                "reward_model": {"kinds": {"safe": ["b"]}},
                "reward_weights": {"reward_model/sfae": 1.0},
            },
            "names reward_model/sfae, which .*; they give reward_model/safe; did you mean",
        ),
        ({"reward_options": {"reward_model/b": {}}}, "names reward_model/b, which is no reward"),
    ],
)
def test_kinds_without_models_and_weights_of_no_reward_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        ActorsConfig(reward=["reward_model"], **settings)


def test_a_head_of_two_rows_is_refused(tmp_path):
    with pytest.raises(InputError, match="no head `score` of one row"):
        member(build_classifier(tmp_path, labels=2))


def test_a_model_whose_scores_would_follow_the_longest_text_of_a_batch_is_refused(tmp_path):
    file = Path(build_classifier(tmp_path)) / "config.json"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 3.0, **factors}
    config = json.loads(file.read_text())
    config["rope_parameters"] = {**rope, "original_max_position_embeddings": 16}
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match="factors follow the longest text of a batch"):
        member(str(tmp_path))


def test_cores_that_are_not_there_are_an_input_error(folders):
    with pytest.raises(InputError, match=r"actors\.reward_model\.cores"):
        load_reward_models(folders, RewardModelConfig(cores="4096"))


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Two process reward models, whose steps end with a comma."""
    root, scale = tmp_path_factory.mktemp("steps"), Scale(separator=",")
    return [build_classifier(root / str(seed), seed=seed, scale=scale) for seed in (3, 4)]


def test_a_step_is_scored_at_its_end_by_a_probability_that_ignores_what_follows(process):
    judge, model = (
        member(process[0]),
        AutoModelForSequenceClassification.from_pretrained(process[0]),
    )
    text = judge.reading("1+2+3=", "1+2=3,,3+3=7, ")
    assert text.places == [5, 12]
    (scores,) = judge.score_at([text.ids], [text.ends])
    tokenizer = AutoTokenizer.from_pretrained(process[0])
    for said, score in zip(("1+2=3,", "1+2=3,3+3=7,"), scores, strict=True):
        ids = tokenizer.encode("1+2+3=" + said, add_special_tokens=False, return_tensors="pt")
        logit = model.model(ids).last_hidden_state[0, -1] @ model.score.weight[0]
        assert float(score) == pytest.approx(logit.sigmoid().item(), abs=1e-5)
    for blank in ("", ",", " ,, "):
        assert judge.reading("1=", blank).places == [len(blank)]
    said = judge.reading([Message("user", "1+2="), Message("assistant", "1,")], "1,2,3")
    assert said.places == [3, 5]
    assert said.ids == judge.reading("1+2=1,", "2,3").ids


def test_the_score_of_a_text_is_that_of_its_worst_step_beside_those_of_all(process, folders):
    text = ("1+2+3=", "1+2=3,3+3=7")
    kinds = {"right": process, "helpful": folders[:1]}
    config = RewardModelConfig(kinds=kinds, combine="mean")
    parts = asyncio.run(load_reward_models(config.named, config).score(*text))
    readings = [member(folder).reading(*text) for folder in process]
    each = [
        member(f).score_at([r.ids], [r.ends])[0] for f, r in zip(process, readings, strict=True)
    ]
    means = torch.stack(each).mean(0).tolist()
    whole = float(member(folders[0], standardise=True).score([member(folders[0]).read(*text)]))
    right, helpful = "reward_model/right", "reward_model/helpful"
    assert dict(parts) == pytest.approx({right: min(means), helpful: whole}, abs=1e-5)
    assert [(s.part, s.end) for s in parts.steps] == [(right, 5), (right, 11), (helpful, 11)]
    assert [s.score for s in parts.steps] == pytest.approx([*means, whole], abs=1e-5)


def test_models_that_split_steps_otherwise_are_not_combined(process, folders):
    with pytest.raises(InputError, match="models of reward_model split steps by different texts"):
        load_reward_models([process[0], folders[0]], RewardModelConfig())


def test_rewards_of_steps_need_a_model_that_scores_steps(process, folders):
    config = RewardModelConfig(each_step=True)
    assert load_reward_models([process[0]], config)
    with pytest.raises(InputError, match="each_step = true, but no reward model scores steps"):
        load_reward_models([folders[0]], config)


def test_a_step_with_the_separator_in_it_is_refused(process):
    with pytest.raises(PromptRefused, match=r"'1,2' has the separator ',' within it"):
        member(process[0]).read.steps("1=", ["1,2"], ",")
