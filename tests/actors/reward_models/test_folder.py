"""Reward models that cannot be used: refused by their folder alone, with what would do."""

import json

import pytest
from reward_model_folders import CONTEXT, build_classifier

from actors.config import ActorsConfig, RewardModelConfig
from actors.reward_models.folder import SCALE_FILE, Scale, load_reader, read_scale
from actors.reward_models.folder import check_reward_model as check
from headway.errors import InputError


def check_reward_model(path, *, standardise=True, new=8, longest=CONTEXT, prompts=()):
    section = RewardModelConfig(standardise=standardise)
    check(path, ActorsConfig(max_new_tokens=new, reward_model=section), longest, prompts)


def edit(folder, name, **keys):
    """Change keys of a JSON file; None removes a key."""
    result = {**json.loads((folder / name).read_text()), **keys}
    (folder / name).write_text(json.dumps({k: v for k, v in result.items() if v is not None}))


def without_padding(folder):
    edit(folder, "config.json", pad_token_id=None)
    edit(folder, "tokenizer_config.json", pad_token=None, unk_token="<eos>")


BROKEN = {
    "language model": (
        lambda f: edit(f, "config.json", architectures=["Qwen3ForCausalLM"]),
        "is a Qwen3ForCausalLM with 1 labels, must be a …ForSequenceClassification with one",
    ),
    "no scale": (lambda f: (f / SCALE_FILE).unlink(), "standardise = false"),
    "broken scale": (lambda f: (f / SCALE_FILE).write_text("{"), "cannot be read"),
    "constant scores": (lambda f: Scale(0.0, 0.0).write(f), "std above 0"),
    "no padding": (without_padding, "name pad_token_id in its config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors file"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_cannot_be_used_is_refused(case, tmp_path):
    build_classifier(tmp_path)
    change, words = BROKEN[case]
    change(tmp_path)
    with pytest.raises(InputError) as caught:
        check_reward_model(str(tmp_path), standardise=True)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_two_labels_are_refused(tmp_path):
    with pytest.raises(InputError, match="with 2 labels"):
        check_reward_model(build_classifier(tmp_path, labels=2), standardise=True)


def test_a_folder_without_a_scale_is_fine_where_none_is_needed(tmp_path):
    check_reward_model(build_classifier(tmp_path, scale=None), standardise=False)


@pytest.mark.parametrize(
    ("prompt", "words"), [("1€=", "no token for '€'"), ("1" * 48, "49 tokens")]
)
def test_a_prompt_that_it_cannot_read_is_refused(tmp_path, prompt, words):
    with pytest.raises(InputError, match=words):
        check_reward_model(build_classifier(tmp_path), standardise=True, prompts=["1+1=", prompt])


def test_a_text_is_closed_unless_it_fills_the_context(tmp_path):
    read = load_reader(build_classifier(tmp_path))
    closed, full = read("1+", "2" * (CONTEXT - 3)), read("1+", "2" * (CONTEXT - 2))
    assert [len(closed), len(full)] == [CONTEXT, CONTEXT]
    assert closed[:-1] == full[:-1]
    assert closed[-1] == 1
    assert full[-1] == full[-2] != 1


@pytest.mark.parametrize(
    ("new", "longest", "fits"), [(43, 99, True), (44, 99, False), (99, 47, True), (99, 48, False)]
)
def test_the_longest_rollout_has_room_in_the_context(tmp_path, new, longest, fits):
    path = build_classifier(tmp_path)
    assert CONTEXT == 48
    if fits:
        check_reward_model(path, new=new, longest=longest, prompts=["1+1="])
        return
    with pytest.raises(InputError) as caught:
        check_reward_model(path, new=new, longest=longest, prompts=["1+1="])
    assert f"min(4 + {new}, {longest}) + 1, and the context" in str(caught.value)
    assert "set actors.max_model_len to at most 47" in str(caught.value)


def test_a_scale_is_read_as_it_was_written(tmp_path):
    Scale(0.25, 3.0).write(tmp_path)
    assert read_scale(str(tmp_path)) == Scale(0.25, 3.0)
