"""Reward models: a text has one score, whatever shares its batch; how several become one."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from characters import TEMPLATE
from hypothesis import given
from hypothesis import strategies as st
from reward_model_folders import build_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from actors.config import RewardModelConfig
from actors.reward_models.folder import Scale
from actors.reward_models.scoring import Member, combine, load_reward_models
from headway.errors import InputError

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
