"""Rows as public data sets have them are read, or refused with the options that read them."""

import json
import re
import tomllib
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from row_files import write_rows

from actors.environments.single_turn import opening
from actors.sources import hub_dataset
from actors.sources.load_source import load_source
from headway.errors import InputError

ASKED = [{"role": "user", "content": "q"}]
TALK = [*ASKED, {"role": "assistant", "content": "a"}]
WORKED = r"We get $x = \boxed{\frac{1}{2}}$."
VERL = {
    "data_source": "openai/gsm8k", "prompt": ASKED, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 0, "answer": "48 + 24\n#### 72"},
}  # fmt: skip
FORMATS = {
    "verl": (VERL, "72"),
    "DAPO-Math-17k": ({**VERL, "extra_info": {"index": "9a"}}, "72"),
    "DAPO-Math-17k processed": ({**VERL, "prompt": "q", "solution": "72"}, "72"),
    "Skywork-OR1": ({**VERL, "reward_model": {"ground_truth": '["42"]'}}, '["42"]'),
    "TRL": ({"prompt": "q", "solution": "4"}, "4"),
    "TRL conversations": ({"prompt": ASKED, "solution": "4"}, "4"),
    "TRL messages": ({"messages": TALK}, None),
    "OpenRLHF": ({"input": "q", "label": "4", "datasource": "math"}, "4"),
    "OpenRLHF messages": ({"context_messages": ASKED, "label": 4}, "4"),
    "prime-rl": ({"question": "q", "answer": "4", "info": {"x": 1}, "task": "math"}, "4"),
    "prime-rl info": ({"prompt": ASKED, "info": json.dumps({"ground_truth": "4"})}, "4"),
    "RLVR": ({"messages": ASKED, "ground_truth": "4", "dataset": "gsm8k"}, "4"),
    "GSM8K": ({"question": "q", "answer": "72\n#### 72"}, "72\n#### 72"),
    "DeepScaleR": ({"problem": "q", "answer": "4", "solution": WORKED}, "4"),
    "NuminaMath-CoT": (
        {"source": "o", "problem": "q", "solution": WORKED, "messages": TALK}, WORKED,
    ),
    "NuminaMath-1.5": ({"problem": "q", "solution": "s", "answer": "4", "synthetic": False}, "4"),
    "OpenR1-Math": (
        {"problem": "q", "solution": "s", "answer": "4", "generations": ["a"], "messages": TALK},
        "4",
    ),
    "MATH": ({"problem": "q", "level": "Level 5", "type": "A", "solution": WORKED}, WORKED),
    "MATH-500": ({"problem": "q", "solution": WORKED, "answer": r"\pi", "unique_id": "t"}, r"\pi"),
    "Big-Math": ({"problem": "q", "answer": "4", "llama8b_solve_rate": 0.5}, "4"),
    "OpenMathInstruct": ({"problem": "q", "generated_solution": "", "expected_answer": "4"}, "4"),
    "AIME": ({"ID": "2024-I-1", "Problem": "q", "Solution": WORKED, "Answer": 204}, "204"),
}  # fmt: skip


class Arrow(list):
    """A data set of the library `datasets`, as far as it is read."""

    def with_format(self, name):
        assert name == "arrow"
        return self

    def __getitem__(self, rows):
        return pa.Table.from_pylist(super().__getitem__(rows))


@pytest.fixture(params=["jsonl", "json", "jsonl.gz", "parquet", "datasets"])
def read(request, tmp_path, monkeypatch):
    """Return a function that reads rows from a file or data set of some kind."""

    def load(*rows, **options):
        path, name = tmp_path / f"rows.{request.param}", "files"
        match request.param:
            case "parquet":
                parquet.write_table(pa.Table.from_pylist([*rows]), path)
            case "json":
                path.write_text(json.dumps(rows, indent=1))
            case "jsonl":
                write_rows(path, *rows)
            case "jsonl.gz":
                with pa.CompressedOutputStream(str(path), "gzip") as file:
                    file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
            case _:
                name = "datasets:some"
                monkeypatch.setattr(hub_dataset, "_split", lambda *_: Arrow(rows))
        options |= {"path": str(path)} if name == "files" else {}
        return load_source(name, options=options, seed=0).next(len(rows))

    return load


@pytest.mark.parametrize("name", FORMATS)
def test_a_public_format_is_read_or_one_line_has_the_options_that_read_it(read, name):
    row, answer = FORMATS[name]
    try:
        [prompt] = read(row)
    except InputError as refusal:
        [hint] = re.findall(
            r"; the options of the source that read such rows: (.*):\n", f"{refusal}"
        )
        options = tomllib.loads(f"options = {{ {hint} }}")["options"]
        [prompt] = read(row, **options)
    assert [message.content for message in opening(prompt)] == ["q"]
    assert prompt.answer == answer


CONVERSATIONS = {
    "su": "su", "u": "u", "sua": "su", "suau": "suau", "suaua": "suau", "suata": "su", "uaa": "u",
}  # fmt: skip
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


@pytest.mark.parametrize(("roles", "kept"), CONVERSATIONS.items())
def test_the_prompt_of_a_column_of_messages_ends_with_the_last_one_of_the_user(read, roles, kept):
    talk = [{"role": ROLES[role], "content": f"{n}"} for n, role in enumerate(roles)]
    [prompt] = read({"messages": talk, "answer": "4"})
    assert [(m.role, m.content) for m in opening(prompt)] == [
        (ROLES[role], f"{n}") for n, role in enumerate(kept)
    ]
    [verbatim] = read({"prompt": talk})
    assert len(opening(verbatim)) == len(roles)
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    [before_calls] = read({"prompt": None, "messages": [*ASKED, calls]})
    assert before_calls.text == "q"
    with pytest.raises(InputError, match="must be a list with a message of the user"):
        read({"messages": talk[:1] if roles[0] == "s" else [{"role": "tool", "content": "x"}]})


def test_numbers_of_columns_are_the_shortest_decimals_that_stand_for_them(tmp_path):
    single, half = pa.float32(), pa.float16()
    columns = {
        "prompt": pa.array(["a", "b"]),
        "answer": pa.array([0.1, 3e-7], single),
        "half": pa.array([np.float16(0.1), None], half),
        "nested": pa.array([{"x": [0.1, None]}, None], pa.struct([("x", pa.list_(single))])),
        "map": pa.array([[("k", 0.3)], []], pa.map_(pa.string(), single)),
        "decimal": pa.array([Decimal("12.50"), Decimal("1E+20")], pa.decimal128(38, 2)),
        "whole": pa.array([2**53 + 1, None], pa.int64()),
        "json": pa.array(['{"x": [1, "a"]}', "2"], pa.json_()),
        "double": pa.array([0.1 + 0.2, None], pa.float64()),
    }
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    options = {"path": str(tmp_path / "x.parquet"), "other_fields": "metadata"}
    prompts = sorted(load_source("files", options=options, seed=0).next(2), key=lambda p: p.text)
    assert [prompt.answer for prompt in prompts] == ["0.1", "0.0000003"]
    assert prompts[0].metadata == {
        "half": 0.1, "nested": {"x": [0.1, None]}, "map": [("k", 0.3)], "decimal": "12.5",
        "whole": 2**53 + 1, "double": 0.1 + 0.2, "json": {"x": [1, "a"]},
    }  # fmt: skip
    assert prompts[1].metadata["decimal"] == f"1{'0' * 20}"
    coded = pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array([0.1], single))
    file = str(tmp_path / "x.arrow")
    for answer in (pa.array([Decimal("0.10")]), pa.array([0.1], single).dictionary_encode(), coded):
        feather.write_feather(pa.table({"prompt": ["a"], "answer": answer}), file)
        [prompt] = load_source("files", options={"path": file}, seed=0).next(1)
        assert prompt.answer == "0.1"


TEXT = 'prompt,answer,\r\n"a ""b"",\r\nc",007,0\r\nd,,1\r\n'


@pytest.mark.parametrize("name", ["X.CSV", "x.tsv", "x.csv.gz", "x.csv.zst"])
def test_fields_of_csv_are_texts_and_empty_ones_are_none(tmp_path, name):
    path, text = tmp_path / name, TEXT.replace(",", "\t") if "tsv" in name else TEXT
    with pa.output_stream(str(path), compression="detect") as file:
        file.write(b"\xef\xbb\xbf" + text.encode())
    prompts = load_source("files", options={"path": str(path)}, seed=0).next(2)
    a = 'a "b"\t\r\nc' if "tsv" in name else 'a "b",\r\nc'
    assert {(prompt.text, prompt.answer) for prompt in prompts} == {(a, "007"), ("d", None)}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", "prompt,prompt\na,b\n", "two columns 'prompt'; rename one"),
        ("x.csv", "prompt,answer\na\n", r"x\.csv:1: has 1 fields, the header 2"),
        ("x.csv", 'prompt\na\n"b\n', "cannot be read after row 1"),
        ("x.csv", "prompt;answer\na;b\n", "separated by ';', must be by ','"),
        ("x.csv", b"prompt\n\xff\n", "is not UTF-8"),
        ("x.json", '[{"prompt": "a"},\n{"prompt"]', "begins with . and is no array of JSON"),
        ("x.JSONL", '{"prompt": "a", "prompt": "b"}', r"x\.JSONL:1: not JSON: has 'prompt' twice"),
        ("x.jsonl", r'{"prompt": "\alpha"}', r"a backslash is written twice, as in .\\\\frac"),
        ("x.jsonl", '{"prompt": "a", "level": 1, "metadata": {"level": 2}}',
         "'level' is a column, and a field of metadata"),
        ("x.jsonl.xz", "{}", r"must end in .*, perhaps with \.gz, \.zst"),
        ("x.jsonl.gz", "{}", "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_without_loss_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"path": str(tmp_path / name), "other_fields": "metadata"}
    with pytest.raises(InputError, match=message):
        load_source("files", options=options, seed=0)


@pytest.mark.parametrize("suffix", ["parquet", "feather"])
def test_two_columns_of_one_name_are_refused_and_the_index_of_pandas_is_left_out(tmp_path, suffix):
    def read(names):
        table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=names)
        if suffix == "parquet":
            parquet.write_table(table, path)
        else:
            with pa.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
        return load_source("files", options={"path": str(path)}, seed=0).next(1)

    path = tmp_path / f"x.{suffix}"
    with pytest.raises(InputError, match="two columns 'prompt'"):
        read(["prompt", "prompt"])
    assert read(["prompt", "__index_level_0__"])[0].metadata == {}


def test_prompt_and_answer_are_not_of_one_field(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", {"prompt": "a"})
    with pytest.raises(InputError, match="must differ"):
        load_source("files", options={"path": path, "answer_field": "prompt"}, seed=0)
