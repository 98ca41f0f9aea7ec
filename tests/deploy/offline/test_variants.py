"""Recorded batches trained with other settings: what may differ, and how it is compared."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deploy.config.loader import load_recipe
from deploy.offline.replay import Plan
from deploy.offline.variants import OWN, describe, draw, parting, read_variants, table
from headway.errors import InputError
from tests.deploy.conftest import RECIPE

VECTORS = st.lists(st.integers(-9, 9), min_size=1, max_size=6).filter(any)


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


@given(VECTORS, st.integers(0, 6))
def test_vectors_part_alike_in_one_piece_or_several(values, cut):
    own, other = vector(*values), vector(*(value + 1 for value in values))
    pieces = [(own[:cut], other[:cut]), (own[cut:], other[cut:])]
    assert parting(pieces) == parting([(own, other)])


@pytest.mark.parametrize(
    ("own", "other", "cosine", "distance", "norm"),
    [
        ((3, 4), (3, 4), 1.0, 0.0, 5.0),
        ((3, 4), (6, 8), 1.0, 1.0, 10.0),
        ((3, 4), (-3, -4), -1.0, 2.0, 5.0),
        ((3, 4), (-4, 3), 0.0, math.sqrt(2), 5.0),
        ((3, 4), (3, 0), 0.6, 0.8, 3.0),
        ((3, 4), (0, 0), None, 1.0, 0.0),
        ((0, 0), (3, 4), None, None, 5.0),
    ],
)
def test_cosine_and_distance_are_those_by_hand(own, other, cosine, distance, norm):
    assert parting([(vector(*own), vector(*other))]) == {
        "norm": norm,
        "cosine": None if cosine is None else pytest.approx(cosine),
        "distance": None if distance is None else pytest.approx(distance),
    }


def basis(*settings, first=4, end=6, earlier=()):
    config = load_recipe(str(RECIPE), settings)
    sessions = tuple(
        SimpleNamespace(end=version, config=load_recipe(str(RECIPE), [setting]).objective, steps=4)
        for version, setting in earlier
    )
    return SimpleNamespace(
        config=config,
        plan=Plan(first, end, 2, None),
        spec=lambda: SimpleNamespace(earlier=sessions),
    )


def test_variants_have_their_settings_and_are_named_by_them():
    chosen = [["learner.learning_rate=2e-4"], ["learner.loss=reinforce", "learner.correction=mis"]]
    variants = read_variants(basis(), chosen)
    assert [*variants] == ["learning_rate=2e-4", "loss=reinforce, correction=mis"]
    first, second = variants.values()
    assert (first.learner.learning_rate, first.learner.loss) == (2e-4, "cispo")
    assert (second.learner.loss, second.learner.correction) == ("reinforce", "mis")


def test_options_of_a_function_do_not_go_on_with_another_in_its_place():
    run = basis('learner.loss="cispo"', "learner.loss_options.cap_high=4.0")
    chosen = [["learner.loss=ppo", "learner.epochs=2"], ["learner.loss_options.cap_high=3.0"]]
    other, capped = read_variants(run, chosen).values()
    assert other.learner.loss_options == {}
    assert capped.learner.loss_options == {"cap_high": 3.0}
    with pytest.raises(InputError, match="'ppo' has no option cap_high"):
        read_variants(run, [["learner.loss=ppo", "learner.loss_options.cap_high=3.0"]])


def test_rollouts_that_are_off_policy_may_be_trained_uncorrected_to_see_what_that_does():
    (variant,) = read_variants(basis(), [["learner.loss=reinforce"]]).values()
    assert (variant.learner.loss, variant.learner.correction) == ("reinforce", "none")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learner.ranks=2", "--set learner.ranks: variants train the same rollouts"),
        (
            "learner.optimizer=muon",
            "recipe of the run with learner.optimizer=muon:\n  learner: opt",
        ),
        ("learner.microbatch_tokens=64", "what may differ is learner.advantage"),
        ("learner.kl.reference=other", "--set learner.kl"),
        ("learner.lora.rank=8", "--set learner.lora"),
        ("actors.temperature=0.5", "--set actors.temperature"),
        ("seed=3", "--set seed"),
        ("learner.learning_rate=1e-4", "the settings that the run has itself"),
        ("learner.correction=nis", "mis"),
    ],
)
def test_settings_that_only_another_run_could_have_are_refused(setting, message):
    with pytest.raises(InputError) as refused:
        read_variants(basis(), [[setting]])
    assert message in str(refused.value)


def test_variants_of_several_ranks_are_refused_with_what_works():
    with pytest.raises(InputError, match=r"learner.ranks = 2; replay without --set"):
        read_variants(basis("learner.ranks=2"), [["learner.loss=reinforce"]])


@pytest.mark.parametrize(("version", "refused"), [(4, False), (5, True), (6, False)])
def test_batches_of_sessions_with_different_settings_are_refused(version, refused):
    crossing = basis(earlier=[(version, "learner.learning_rate=1e-3")])
    if not refused:
        assert read_variants(crossing, [["learner.loss=reinforce"]])
        return
    with pytest.raises(InputError, match="changed its settings before batch 5"):
        read_variants(crossing, [["learner.loss=reinforce"]])


def record(**changed):
    row = {
        "loss": 0.5, "ess": 0.9, "grad_norm": 2.0, "gradient_cosine": 1.0, "change_norm": 0.1,
        "change_cosine": None, "distance": 0.0, "fractions": {"capped": 0.25, "rejected": 0.0},
    }  # fmt: skip
    rows = [
        {"version": version, "settings": name, **row, **(changed if name != OWN else {})}
        for version in (4, 5)
        for name in (OWN, "loss=raft")
    ]
    return {"run": "small", "equal": True, "left_out": "…", "batches": rows}


def test_a_variant_without_effect_is_named_as_such_and_another_not():
    assert "loss=raft: without effect on these batches, but for rounding" in describe(record())
    assert describe(record(distance=1e-6)) == describe(record())
    assert not any("without effect" in line for line in describe(record(distance=0.5)))


def test_a_run_whose_weights_are_not_trained_again_is_said_first():
    assert "did NOT give its weights again" in describe({**record(), "equal": False})[0]


def test_the_table_shows_shares_that_are_not_zero_and_figures_that_are_missing():
    shown = table(record()["batches"])
    assert shown.row_count == 4
    cells = [[*column.cells][1] for column in shown.columns]
    assert cells == ["4", "loss=raft", "2", "1", "0.1", "–", "0", "0.9", "0.5", "capped 25.0%"]


def test_a_picture_and_the_figures_are_written_together(tmp_path):
    draw(record(gradient_cosine=None), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "replay.json", "replay.png", "replay.svg",
    ]  # fmt: skip
    assert "loss=raft" in (tmp_path / "out/replay.svg").read_text()
    assert json.loads((tmp_path / "out/replay.json").read_text())["run"] == "small"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.deepspeed
def test_variants_part_from_the_run_and_its_own_settings_give_its_weights(
    headway, finished, tmp_path
):
    shown = headway(
        "replay", "small", "--steps", "3:5", "--set", "learner.learning_rate=2e-6",
        "--variant", "learner.loss=reinforce learner.correction=mis",
        "--variant", "learner.max_token_lag=99", "--out", tmp_path, "--json",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = json.loads(shown.stdout)
    assert found["equal"], "the run's own settings train its weights again"
    assert json.loads((tmp_path / "replay.json").read_text()) == found
    rows = {(row["version"], row["settings"]): row for row in found["batches"]}
    assert len(rows) == 2 * 4
    trained = finished.rows("metrics.jsonl")
    for version in (3, 4):
        own = rows[version, OWN]
        for key in ("loss", "grad_norm", "ess", "fractions"):
            assert own[key] == trained[version][key]
        alike = rows[version, "max_token_lag=99"]
        for row in (own, alike):
            assert (row["gradient_cosine"], row["distance"]) == (1.0, 0.0)
            assert row["change_cosine"] == 1.0
    faster = rows[3, "learning_rate=2e-6"]
    assert faster["gradient_cosine"] == 1.0, "at the same weights"
    assert faster["distance"] == pytest.approx(1.0, rel=0.02), "a step of twice the length"
    assert faster["change_cosine"] == pytest.approx(1.0, abs=1e-3)
    corrected = rows[3, "loss=reinforce, correction=mis"]
    assert corrected["distance"] > 0
