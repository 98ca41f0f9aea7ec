"""Answers that cannot be scored are named by their rows before a run."""

import json

import pytest

from deploy.config.loader import load_recipe
from deploy.preflight import answers
from deploy.preflight.inputs import check_code
from headway.errors import InputError

SMALL = ["heldout.size=1", "heldout.final_size=1", "prompts.groups_per_batch=1"]
SLOW = "(" * 60 + "1" + ")" * 60


def check(tmp_path, rows, *overrides, heldout=(("1+1", "2"),)):
    """Check a recipe whose prompts, and held-out problems, are rows of question and answer."""
    for name, table in (("train", rows), ("held", heldout)):
        lines = [json.dumps({"prompt": text, "answer": answer}) for text, answer in table]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {"path": tmp_path / "train.jsonl", "heldout_path": tmp_path / "held.jsonl"}
    options = ", ".join(f'{key} = "{path}"' for key, path in paths.items())
    chosen = ["prompts.source=files", f"prompts.source_options={{{options}}}", *SMALL]
    check_code(load_recipe("demo", [*chosen, *overrides]))


def many(*answers, before=40):
    return [(f"question {n}", a) for n, a in enumerate([*["1"] * before, *answers])]


@pytest.mark.parametrize(
    ("reward", "answers", "named"),
    [
        (
            "math_verify",
            [r"2\sqrt{3}", "3 4", "C", "see above for all the details", "3 4"],
            ["of 45 prompts, 3 have an answer", "l:42: .*'3 4'", "l:44: .*see", "l:45: .*'3 4'"],
        ),
        ("numeric_match", ["2", "seven"], ["of 42 prompts, 1", "train.jsonl:42: .*seven"]),
        ("last_answer", ["seven"], []),
    ],
)
def test_answers_that_no_completion_can_equal_are_named_by_row(tmp_path, reward, answers, named):
    rows, chosen = many(*answers), f"actors.reward=['{reward}']"
    if not named:
        check(tmp_path, rows, chosen)
        return
    with pytest.raises(InputError, match="(?s)" + ".*".join(named)):
        check(tmp_path, rows, chosen)


def test_answers_of_held_out_problems_and_of_parts_of_a_mixture_are_read_too(tmp_path):
    chosen = "actors.reward=['math_verify']"
    scored = "actors.heldout_reward=['math_verify']"
    with pytest.raises(InputError, match=r"(?s)of 1 prompts, 1 .*held_heldout/0/1: .*'3 4'"):
        check(tmp_path, many("2"), scored, heldout=[("1+1", "3 4")])
    check(tmp_path, many("3 4"), "actors.reward=['exact_match']")
    parts = (
        f'[{{source="tiny:twice"}}, {{source="files", options={{path="{tmp_path}/train.jsonl"}}}}]'
    )
    mixed = ["prompts.source=mixture", f"prompts.source_options={{parts={parts}}}", chosen, *SMALL]
    with pytest.raises(InputError, match=r"train.jsonl:41.*'3 4'"):
        check_code(load_recipe("demo", mixed))


def test_an_answer_that_takes_ages_is_named_and_the_others_are_read(tmp_path):
    chosen = ["actors.reward=['math_verify']", "actors.verifier_seconds=0.5"]
    with pytest.raises(InputError, match=r"(?s)train.jsonl:1: .*processor time.*train.jsonl:3: "):
        check(tmp_path, many(SLOW, "2", "3 4", before=0), *chosen)


def test_a_check_past_its_limit_says_what_it_has_not_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(answers, "SECONDS", 0.0)
    monkeypatch.setattr(answers, "PROGRESS_SECONDS", 0.0)
    rows = many(*map(str, range(2, 60)), "3 4")
    check(tmp_path, rows, "actors.reward=['math_verify']")
    output = capsys.readouterr().err
    assert "of 60 answers were read in 0 s" in output
    assert "read 1 of 60 answers" in output
