"""`headway bench peers`: its runs and conclusions, and what the workers of all peers share."""

from types import SimpleNamespace

import pytest

from benchmarks.loop.peer_run import PeerRun
from benchmarks.loop.peers import PeerOptions, arms_of, check_alike, conclude, misses
from deploy.config.loader import load_recipe
from headway.errors import InputError


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("Headway", 0, 100.0, 10.0), ("TRL, a", 0, 50.0, 15.0)], {"TRL": (2.0, 10 / 15)}),
        ([("Headway", 0, 100.0, 10.0), ("TRL, a", 0, 50.0, None)], {"TRL": (2.0, None)}),
        (
            [("Headway", 0, 90.0, 9.0), ("Headway", 1, 80.0, 8.0), ("TRL, a", 1, 40.0, 16.0)],
            {"TRL": (2.0, 0.5)},
        ),
        ([("TRL, a", 0, 40.0, 16.0)], {"TRL": (None, None)}),
        (
            [("Tunix", 0, 25.0, 40.0), ("Headway", 0, 100.0, 10.0), ("TRL, a", 0, 50.0, 20.0)],
            {"Tunix": (4.0, 0.25), "TRL": (2.0, 0.5)},
        ),
    ],
    ids=["both", "no target", "one seed failed", "Headway failed", "two peers"],
)
def test_headway_stands_beside_each_peer_within_a_seed(runs, expected):
    keys = ("name", "seed", "samples_per_second", "seconds_to_target")
    result = conclude([dict(zip(keys, run, strict=True), score=0.5) for run in runs])
    assert {peer: (of["throughput"], of["time"]) for peer, of in result.items()} == expected


def test_a_peer_with_a_higher_score_in_the_median_is_a_missed_aim():
    shared = {"samples_per_second": 1.0, "seconds_to_target": None}
    scores = {"Headway": (0.0, 0.5, 0.6), "TRL, a": (0.1, 0.25, 0.5), "Tunix": (0.25, 0.75, 0.5)}
    found = conclude(
        [
            {"name": name, "seed": seed, "score": score, **shared}
            for name, of_seeds in scores.items()
            for seed, score in enumerate(of_seeds)
        ]
    )
    assert {peer: round(of["score"], 6) for peer, of in found.items()} == {
        "TRL": 0.1, "Tunix": -0.25,
    }  # fmt: skip
    assert misses({"conclusions": found}) == [
        "the score is 0.250 below Tunix's after the same samples, in the median over seeds"
    ]


def test_a_recipe_with_an_objective_that_peers_do_not_get_is_refused():
    check_alike(load_recipe("demo"))
    with pytest.raises(InputError, match=r"learner\.advantage = 'rloo'"):
        check_alike(load_recipe("demo", ['learner.advantage="rloo"']))


def test_each_peer_has_one_run_of_a_seed_with_its_own_options():
    base = load_recipe("demo", ["seed=3"])
    _, trl, tunix = arms_of(base, PeerOptions(threads=1))
    assert (trl.name, trl.config.name) == (
        "TRL, microbatch 32, generation padded, threads 1",
        "trl-32-padded-1-seed3",
    )
    assert trl.worker == ("benchmarks.loop.trl_worker", "32", "padded", "1")
    assert (tunix.name, tunix.config.name, tunix.seed) == ("Tunix", "tunix-seed3", 3)
    assert tunix.worker == ("benchmarks.loop.tunix_worker",)
    assert [arm.name for arm in arms_of(base, PeerOptions(peers=["tunix"]))] == ["Headway", "Tunix"]


class Letters:
    """A tokenizer of characters, whose end token is 0."""

    eos_token_id = 0

    def batch_decode(self, rows, *, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(token) for token in row if token) for row in rows]

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def save_pretrained(folder):
    folder.mkdir(parents=True)
    (folder / "model").write_text("weights")


def test_a_batch_of_a_peer_is_scored_counted_and_saved_as_headways(tmp_path):
    folder = [f"deploy.runs_dir={tmp_path}", "steps=3", "learner.checkpoint_every=2"]
    config = load_recipe("demo", folder)
    run = PeerRun(config, "", [], Letters())
    ended, cut = [ord("="), ord("7"), 0], [ord("="), ord("7")]
    with run.directory.created(config, replace=False):
        for _step in range(3):
            run.begin()
            rewards = run.rewards(["3+4", "3+4", "1+1"], [ended, cut, ended], ["7", "7", "2"])
            assert rewards == [1.0, 0.0, 0.0]
            run.end(lambda: SimpleNamespace(save_pretrained=save_pretrained))
    rows = run.directory.rows("metrics.jsonl")
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert {(row["rollouts_trained"], row["tokens_trained"]) for row in rows} == {(3, 8)}
    assert all(row["wait_started_at"] <= row["step_finished_at"] for row in rows)
    saved = {f"{file.parent.name}/{file.name}" for file in run.directory.checkpoints.glob("*/*")}
    names = ("model", "tokenizer.json")
    assert saved == {f"v00000{version}/{name}" for version in (2, 3) for name in names}
