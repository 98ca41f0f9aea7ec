"""`headway reward-model`: its pairs, its folder, and the run that asks what it made."""

import asyncio
import json
import signal
from itertools import islice
from typing import ClassVar

import psutil
import pytest

from actors.config import RewardModelConfig
from actors.reward_models.folder import TextReader
from deploy.config.loader import load_recipe
from deploy.offline.reward_models import PreferencePairs
from deploy.preflight.models import reward_model_origin, reward_model_paths
from headway.errors import InputError
from tests.deploy.conftest import FinishedRun
from tests.waiting import until

SECTION = (
    "reward_model.pairs=lettered_chain_sum",
    "reward_model.members=2",
    "reward_model.steps=3",
    "reward_model.batch_pairs=4",
    "reward_model.heldout_pairs=16",
)
JUDGED = "actors.reward=['reward_model']"


class Letters:
    """A tokenizer with a token for each of Unicode's characters."""

    chat_template, eos_token_id, pad_token_id, unk_token_id = None, 1, 0, None
    added_tokens_decoder: ClassVar = {}
    special_tokens_map: ClassVar = {}

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


def config_of(tmp_path, *settings):
    runs = f"deploy.runs_dir={tmp_path / 'runs'}"
    return load_recipe("demo", [runs, "heldout.size=20", "heldout.final_size=20", *settings])


def pairs_of(tmp_path):
    config = config_of(tmp_path, "reward_model.heldout_pairs=200")
    return PreferencePairs(config, config.reward_model, TextReader(Letters(), 256))


def prompt_of(pair):
    text = "".join(map(chr, pair.chosen))
    return text[: text.index("=")]


def test_no_member_trains_a_held_out_pair_and_each_has_an_order_of_its_own(tmp_path):
    pairs = pairs_of(tmp_path)
    heldout = {prompt_of(pair) for pair in pairs.heldout}
    orders = [[prompt_of(pair) for pair in islice(pairs.training(m), 800)] for m in (0, 1)]
    assert len(pairs.heldout) == 200
    for order in orders:
        assert not heldout & set(order)
    assert orders[0][:20] != orders[1][:20]
    assert orders[0] == [prompt_of(pair) for pair in islice(pairs.training(0), 800)]


def message(role, content):
    return {"role": role, "content": content}


ASKED, YES, NO = (
    message("user", "Is it?"),
    message("assistant", "Yes."),
    message("assistant", "No."),
)


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1=2", "1+1=3"),
        ({"chosen": "\n\nHuman: Is it?\n\nAssistant: Yes.",
          "rejected": "\n\nHuman: Is it?\n\nAssistant: No."}, "Is it?Yes.", "Is it?No."),
        ({"prompt": "Is it?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
         "Is it?Yes.", "Is it?No."),
        ({"chosen": [ASKED, YES, ASKED, NO], "rejected": [ASKED, NO]},
         "Is it?Yes.Is it?No.", "Is it?No."),
        ({"system": "Be brief. ", "prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
         "Be brief. Is it?Yes.", "Be brief. Is it?No."),
    ],
    ids=["texts", "hh-rlhf", "ultrafeedback", "several turns", "system"],
)  # fmt: skip
def test_pairs_are_read_in_every_form_of_a_preference_set(tmp_path, row, chosen, rejected):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    config = config_of(
        tmp_path, f"reward_model.pairs={tmp_path}/pairs.jsonl", "reward_model.heldout_pairs=1"
    )
    [pair] = PreferencePairs(config, config.reward_model, TextReader(Letters(), 256)).heldout
    read = ["".join(map(chr, ids)) for ids in (pair.chosen, pair.rejected)]
    assert read == [f"{chosen}\x01", f"{rejected}\x01"]


def test_a_completion_that_is_judged_alone_is_no_pair(tmp_path):
    (tmp_path / "judged.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}')
    config = config_of(tmp_path, f"reward_model.pairs={tmp_path}/judged.jsonl")
    with pytest.raises(InputError, match=r"reward_model.pairs = .*: 'a' has one completion with a"):
        PreferencePairs(config, config.reward_model, TextReader(Letters(), 256))


def test_a_run_asks_for_reward_models_that_are_not_made_yet_or_were_made_otherwise(tmp_path):
    config = config_of(tmp_path, JUDGED)
    with pytest.raises(InputError, match="run `headway reward-model` with the same recipe"):
        reward_model_paths(config)
    (config.reward_models / "model-0").mkdir(parents=True)
    with pytest.raises(InputError, match="has no record of what it was made with"):
        reward_model_paths(config)
    assert reward_model_paths(config_of(tmp_path)) == ()


def test_members_are_found_in_the_order_of_their_numbers(tmp_path):
    config = config_of(tmp_path, JUDGED)
    for member in (10, 2, 0):
        (config.reward_models / f"model-{member}").mkdir(parents=True)
    origin = reward_model_origin(config)
    (config.reward_models / "origin.json").write_text(origin)
    names = [path.rpartition("/")[2] for path in reward_model_paths(config)]
    assert names == ["model-0", "model-2", "model-10"]


@pytest.fixture(scope="module")
def made(headway):
    """Train two reward models of the small recipe; return their folder and the output."""
    result = headway.recipe("reward-model", *SECTION)
    assert result.returncode == 0, result.stdout + result.stderr
    return headway.folder / "runs" / "small-rm", result.stdout


@pytest.mark.slow
@pytest.mark.deepspeed
def test_the_members_differ_and_say_what_they_are_worth(made):
    folder, said = made
    report = json.loads((folder / "reward_model.json").read_text())
    assert [member["folder"] for member in report["members"]] == ["model-0", "model-1"]
    assert report["heldout_pairs"] == 16
    for number, member in enumerate(report["members"]):
        assert 0 <= member["heldout_accuracy"] <= 1
        assert f"reward model {number}: held-out accuracy {member['heldout_accuracy']:.3f}" in said
        scale = json.loads((folder / f"model-{number}" / "reward_scale.json").read_text())
        assert scale == member["scale"]
    weights = [(folder / f"model-{n}" / "model.safetensors").read_bytes() for n in (0, 1)]
    assert weights[0] != weights[1]


def check_served(path):
    """Standardised, a member's scores of the held-out pairs have mean 0, deviation 1."""
    import torch

    from actors.reward_models.scoring import Member

    trained = Member(str(path), RewardModelConfig(standardise=True))
    config = load_recipe("tests/deploy/recipe.toml", SECTION)
    pairs = PreferencePairs(config, config.reward_model, trained.read).heldout
    scores = torch.cat(
        [trained.score([text]) for pair in pairs for text in (pair.chosen, pair.rejected)]
    )
    assert float(scores.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(scores.std()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("member", [0, 1])
def test_what_was_trained_is_what_is_served(made, member):
    folder, _ = made
    check_served(folder / f"model-{member}")


@pytest.mark.slow
@pytest.mark.deepspeed
def test_another_round_begins_with_the_head_and_the_weights_of_the_one_before(headway, made):
    folder, _ = made
    settings = ("steps=1", "learning_rate=1e-12", "muon_learning_rate=1e-12", "members=1",
                "name=second", f"path={folder / 'model-1'}")  # fmt: skip
    result = headway.recipe("reward-model", *SECTION, *(f"reward_model.{key}" for key in settings))
    assert result.returncode == 0, result.stdout + result.stderr
    second = headway.folder / "runs" / "second-rm"
    first, after = (json.loads((f / "reward_model.json").read_text()) for f in (folder, second))
    earlier, again = first["members"][1], after["members"][0]
    assert again["heldout_loss"] == pytest.approx(earlier["heldout_loss"], rel=1e-5)
    assert again["scale"] == pytest.approx(earlier["scale"], rel=1e-5)
    check_served(second / "model-0")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_train_what_one_does(headway, made, zero_stage):
    ranks = ("ranks=2", f"zero_stage={zero_stage}", "members=1", f"name=two{zero_stage}")
    result = headway.recipe("reward-model", *SECTION, *(f"reward_model.{key}" for key in ranks))
    assert result.returncode == 0, result.stdout + result.stderr
    made_by_two = headway.folder / f"runs/two{zero_stage}-rm"
    one, two = (json.loads((f / "reward_model.json").read_text()) for f in (made[0], made_by_two))
    for key in ("heldout_accuracy", "heldout_loss"):
        assert two["members"][0][key] == pytest.approx(one["members"][0][key], rel=1e-4)


@pytest.mark.deepspeed
@pytest.mark.slow
def test_an_adapter_is_merged_into_the_model_that_is_served(headway):
    settings = (*SECTION, "reward_model.name=adapted", "reward_model.lora.rank=4")
    result = headway.recipe("reward-model", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    for member in (0, 1):
        check_served(headway.folder / f"runs/adapted-rm/model-{member}")


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_process_reward_model_learns_which_steps_are_right_and_says_how_many_faults_it_finds(
    headway,
):
    process = ("kind=process", "separator=','", "steps=60", "members=1", "name=process",
               "learning_rate=2e-3", "batch_pairs=32", "heldout_pairs=64")  # fmt: skip
    result = headway.recipe("reward-model", *SECTION, *(f"reward_model.{key}" for key in process))
    assert result.returncode == 0, result.stdout + result.stderr
    folder = headway.folder / "runs" / "process-rm"
    (member,) = json.loads((folder / "reward_model.json").read_text())["members"]
    assert 0 <= member["heldout_faults_found"] <= 1
    assert member["heldout_accuracy"] > 0.6
    assert f"faults found {member['heldout_faults_found']:.3f} (64 completions)" in result.stdout
    from actors.reward_models.scoring import load_reward_models

    config = RewardModelConfig(paths=[str(folder / "model-0")])
    verdict = asyncio.run(
        load_reward_models(config.paths, config).score("a1b+2c+3=", "b1+2=3,c3+3=6")
    )
    assert [step.end for step in verdict.steps] == [6, 13]
    assert verdict["reward_model"] == min(step.score for step in verdict.steps)


@pytest.mark.slow
@pytest.mark.deepspeed
def test_an_interrupt_leaves_nothing_half_written(headway, made):
    settings = [s for s in SECTION if "steps" not in s]
    process = headway.start(
        "reward-model", *settings, "reward_model.steps=100000", "reward_model.name=stopped"
    )
    partial = headway.folder / "runs" / ".stopped-rm.partial"
    until(lambda: partial.exists() or process.poll() is not None, seconds=120)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not list(partial.parent.glob("*stopped*"))


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_run_outlives_the_process_of_its_reward_models(headway, made):
    process = headway.start(
        "run", *SECTION, JUDGED, "name=judged", "sft.name=small", "reward_model.name=small",
        "actors.heldout_reward=['last_answer']", "steps=40", "heldout.every=40",
    )  # fmt: skip
    headway.wait_for_batches("judged", 5, process)
    below = psutil.Process(process.pid).children(recursive=True)
    (judge,) = [p for p in below if p.name().startswith("ray::RewardModel")]
    judge.kill()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "reward-model is restarted (1 of 5 in a row)" in output
    run = FinishedRun(headway.run_folder("judged"), output)
    assert [row["actor"] for row in run.rows("restarts.jsonl")] == ["reward-model"]
    restarts = run.summary["restarts"]
    assert restarts.pop("reward_models") == 1
    assert not any(restarts.values())
    accounts = headway.accounting("judged")
    assert accounts["balanced"]
    assert accounts["failed"] == {}
    trained = [row for row in headway.rollouts("judged") if row["state"] == "trained"]
    assert {name for row in trained for name, _ in row["reward_parts"]} == {"reward_model"}
    assert len({round(row["reward"], 3) for row in trained}) > 10
