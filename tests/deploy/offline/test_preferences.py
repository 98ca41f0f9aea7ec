"""`headway prefer`: its data, its folder, and the run that begins from what it made."""

import json
import signal

import pytest

from deploy.config.loader import load_recipe
from deploy.offline.preferences import Preferences
from deploy.preflight.models import model_path, prefer_origin, warm_started_path
from headway.errors import InputError
from tests.deploy.conftest import FinishedRun
from tests.waiting import until

FORMS = {
    "texts": lambda p, a, b: {"prompt": p, "chosen": a, "rejected": b},
    "turns in a text": lambda p, a, b: {"chosen": turns(p, a), "rejected": turns(p, b)},
    "messages": lambda p, a, b: {"prompt": [user(p)], "chosen": [said(a)], "rejected": [said(b)]},
    "conversations": lambda p, a, b: {
        "chosen": [user(p), said(a)],
        "rejected": [user(p), said(b)],
    },
}


def user(content):
    return {"role": "user", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


def turns(prompt, answer):
    return f"\n\nHuman: {prompt}\n\nAssistant: {answer}"


def write(folder, form, count=24):
    """Write pairs, whose better answer is the digit of its problem, and whose worse is a letter."""
    file = folder / "pairs.jsonl"
    rows = [FORMS[form](f"a{i}=", f"{i % 10}", "b") for i in range(count)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"prefer.pairs={file}"


def judged(folder, labels, prompts=8):
    """Write completions that are judged alone."""
    file = folder / "judged.jsonl"
    rows = [
        {"prompt": f"a{i % prompts}=", "completion": f"{i}", "label": label}
        for i, label in enumerate(labels)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return f"prefer.pairs={file}", "prefer.loss=kto"


def config_of(tmp_path, *settings):
    runs = f"deploy.runs_dir={tmp_path / 'runs'}"
    sizes = ["prefer.heldout_pairs=4", "prefer.batch_pairs=5", "prefer.steps=20"]
    return load_recipe("tests/deploy/recipe.toml", [runs, *sizes, *settings])


def preferences_of(tmp_path, *settings):
    config = config_of(tmp_path, *settings)
    return Preferences(config, config.prefer, None)


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_every_form_have_the_ids_of_one_prompt_and_its_answers(tmp_path, form):
    preferences = preferences_of(tmp_path, write(tmp_path, form))
    assert len(preferences.training) == 100
    assert not {e[0] for e in preferences.training} & {e[0] for e in preferences.heldout}
    for example in preferences.training[:20]:
        better, worse = preferences.preference(example).texts
        start = better.loss_mask.index(True)
        assert better.token_ids[:start] == worse.token_ids[:start]
        assert all(better.loss_mask[start:])
        assert worse.loss_mask.index(True) == start
        assert better.token_ids != worse.token_ids
        assert better.token_ids[-1] == worse.token_ids[-1], "both end as a rollout does"


def test_under_kto_every_completion_has_an_unrelated_one_of_another_prompt(tmp_path):
    settings = judged(tmp_path, [True, True, False] * 8, prompts=6)
    preferences = preferences_of(tmp_path, *settings)
    labels = {e: bool(e[1]) for e in preferences.training}
    assert {*labels.values()} == {True, False}
    preferences.reference = {e: (-at, at) for at, e in enumerate(preferences.distinct)}
    for example, desirable in labels.items():
        preference = preferences.preference(example)
        [own], [other] = preference.texts, preference.unrelated.texts
        start = own.loss_mask.index(True)
        assert preference.desirable == desirable
        assert other.token_ids[:start] == own.token_ids[:start]
        assert other.token_ids[start:] != own.token_ids[start:]
        at = preferences.distinct.index(example)
        assert (preference.reference, preference.unrelated.reference) == ((-at,), (at,))


def test_a_pair_is_two_judged_completions_under_kto(tmp_path):
    preferences = preferences_of(tmp_path, write(tmp_path, "texts"), "prefer.loss=kto")
    assert len(preferences.heldout) == 8
    assert {bool(chosen) for _, chosen, _ in preferences.training} == {True, False}


def test_judged_completions_are_for_kto_and_a_pair_must_fit_into_the_context(tmp_path):
    settings = judged(tmp_path, [True, False] * 12)
    with pytest.raises(InputError, match=r'prefer.pairs = .* set prefer.loss = "kto"'):
        preferences_of(tmp_path, *settings, "prefer.loss=dpo")
    preferences = preferences_of(tmp_path, write(tmp_path, "texts"))
    with pytest.raises(InputError, match=r"prefer.pairs: 'a=' .* must have at most 256"):
        preferences.texts(("a=", "1" * 300, "2"))
    with pytest.raises(InputError, match=r"lower prefer.heldout_pairs = 24"):
        preferences_of(tmp_path, write(tmp_path, "texts"), "prefer.heldout_pairs=24")


def test_a_run_begins_from_the_preferred_model_and_preferences_from_the_warm_start(tmp_path):
    config = config_of(tmp_path, write(tmp_path, "texts"), "prefer.name=better")
    config = config.model_copy(update={"sft": None})
    folder = config.preferred
    assert folder == tmp_path / "runs" / "better-prefer" / "model"
    with pytest.raises(InputError, match="run `headway prefer` with the same recipe"):
        model_path(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "origin.json").write_text(prefer_origin(config))
    assert model_path(config, is_new=True) == str(folder)
    with pytest.raises(InputError, match=r"no \[sft\] section"):
        warm_started_path(config)
    assert model_path(config.updated(prefer={"eval_every": 2})) == str(folder)
    other = config.updated(prefer={"loss": "ipo"})
    with pytest.raises(InputError, match=r'prefer.loss = "dpo", not "ipo".*headway prefer'):
        model_path(other)
    write(tmp_path, "messages")
    with pytest.raises(InputError, match="was made with another"):
        model_path(config, is_new=True)


SIZES = "prefer.steps=12", "prefer.batch_pairs=8", "prefer.heldout_pairs=6", "prefer.eval_every=1"


def losses_of(headway, name):
    model = headway.folder / "runs" / f"{name}-prefer" / "model"
    assert (model / "config.json").exists()
    return [json.loads(line) for line in (model / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("loss", "form"),
    [*(("dpo", form) for form in FORMS), ("ipo", "texts"), ("orpo", "texts"), ("simpo", "texts"),
     ("kto", "texts")],
)  # fmt: skip
def test_preferences_are_learned_and_the_report_says_how_well(headway, tmp_path, loss, form):
    name = f"{loss}-{form.replace(' ', '-')}"
    settings = (
        write(tmp_path, form), f"prefer.loss={loss}", f"prefer.name={name}",
        "prefer.learning_rate=1e-3", *SIZES,
    )  # fmt: skip
    result = headway.recipe("prefer", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = losses_of(headway, name)
    assert [row["step"] for row in rows] == [*range(1, 13)]
    assert rows[-1]["heldout_loss"] < rows[0]["heldout_loss"]
    assert rows[-1]["heldout_accuracy"] >= rows[0]["heldout_accuracy"]
    assert "exists; choose another name" in headway.recipe("prefer", *settings).stderr


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
def test_two_ranks_learn_what_one_does_and_go_on_with_the_reference_after_an_interruption(
    headway, tmp_path
):
    settings = (
        write(tmp_path, "texts"), *SIZES, "prefer.steps=24", "prefer.checkpoint_every=4",
        "prefer.learning_rate=1e-4", "prefer.epsilon=1e-3",
    )  # fmt: skip
    alone = headway.recipe("prefer", "prefer.name=alone", *settings)
    assert alone.returncode == 0, alone.stderr
    together = ("prefer.name=pair", "prefer.ranks=2", "prefer.zero_stage=3", *settings)
    process = headway.start("prefer", *together)
    folder = headway.folder / "runs" / "pair-prefer"
    until((folder / "unfinished/v000004/state.json").exists, 200, process=process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    again = headway.recipe("prefer", *together)
    assert again.returncode == 0, again.stderr
    assert "scored by the reference" not in again.stdout
    for key in ("step", "tokens", "loss", "accuracy", "heldout_loss", "heldout_accuracy"):
        found, wanted = ([row[key] for row in losses_of(headway, n)] for n in ("pair", "alone"))
        assert found == pytest.approx(wanted, rel=1e-5), key


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_run_goes_on_from_the_preferred_model(headway, tmp_path):
    settings = (
        write(tmp_path, "texts"), "prefer.name=first", "prefer.steps=2", "prefer.batch_pairs=4",
        "prefer.heldout_pairs=4", "prefer.lora.rank=2",
    )  # fmt: skip
    assert headway.recipe("prefer", *settings).returncode == 0
    result = headway.recipe("run", "name=after-preferences", "sft.name=small", *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    run = FinishedRun(headway.run_folder("after-preferences"), result.stdout)
    assert run.summary["version"] == 4
