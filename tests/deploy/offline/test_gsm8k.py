"""The files of GSM8K, from rows of its form."""

import json
import runpy
import sys

import pytest

from actors.sources.load_source import load_source
from deploy.offline import gsm8k
from headway.errors import InputError

ROWS = [
    {"question": "Two and two? ", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "Half of 2,468?", "answer": "#### not yet\n2468 / 2\n#### 1,234"},
]


def test_the_files_can_be_read_as_prompts_with_their_answers(tmp_path, monkeypatch, capsys):
    def rows(name, split, options):
        assert (name, options.config) == ("openai/gsm8k", "main")
        return enumerate(ROWS if split == "train" else ROWS[:1], 1)

    monkeypatch.setattr(gsm8k, "dataset_rows", rows)
    gsm8k.main(str(tmp_path / "data"))
    train, test = map(str, capsys.readouterr().out.split())
    source = load_source("files", options={"path": train, "heldout_path": test}, seed=0)
    answers = {prompt.answer for prompt in source.next(2)}
    assert answers == {"4", "1234"}
    first = json.loads((tmp_path / "data" / "gsm8k_train.jsonl").read_text().splitlines()[0])
    assert first["prompt"].startswith("Two and two?\nReason")


def test_a_solution_without_its_number_is_refused_and_no_file_is_left(tmp_path, monkeypatch):
    broken = [(1, ROWS[0]), (2, {"question": "Why?", "answer": "because"})]
    monkeypatch.setattr(gsm8k, "dataset_rows", lambda name, split, options: broken)
    with pytest.raises(InputError, match=r"'Why\?' ends without #### and a number"):
        gsm8k.main(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_the_library_one_message_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(sys, "argv", ["gsm8k", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(gsm8k.__file__, run_name="__main__")
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("headway: it needs the library datasets")
    assert printed.count("\n") == 1
