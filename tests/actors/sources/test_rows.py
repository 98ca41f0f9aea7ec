"""Rows of files and data sets: what is read, what is left out, and how that is told."""

import asyncio
import json
import logging
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet
from row_files import write_rows

from actors.environments.single_turn import SingleTurn
from actors.sources.examples import DEMONSTRATIONS, load_examples
from actors.sources.load_source import load_source
from headway.errors import InputError


def texts(path, count, **options):
    source = load_source("files", options={"path": path, **options}, seed=0)
    return {prompt.text for prompt in source.next(count)}


BAD = [{"prompt": "a"}, b"{", {"prompt": "b"}, b"\xff", {"prompt": 3}, b"[" * 100_000]


def test_all_bad_rows_are_told_by_their_lines_in_one_message(tmp_path):
    with pytest.raises(InputError) as caught:
        texts(write_rows(tmp_path / "x.jsonl", *BAD), 1)
    message = str(caught.value)
    reported = [line.partition("x.jsonl:")[2] for line in message.splitlines()[1:]]
    reasons = (
        (2, "not JSON: Expecting property name"),
        (4, "not UTF-8"),
        (5, "prompt is 3"),
        (6, "not JSON"),
    )
    for line, (number, reason) in zip(reported, reasons, strict=True):
        assert line.startswith(f"{number}: {reason}")
    with pytest.raises(InputError, match="and 90 more"):
        texts(write_rows(tmp_path / "many.jsonl", *[b"{"] * 100), 1)


def test_bad_rows_are_left_out_and_told_where_a_recipe_says_so(tmp_path, caplog):
    path = write_rows(tmp_path / "x.jsonl", *BAD)
    with caplog.at_level(logging.WARNING, "headway.sources"):
        assert texts(path, 4, bad_rows="skip") == {"a", "b"}
    (record,) = caplog.records
    assert record.getMessage().startswith("4 rows were left out: ")
    assert "x.jsonl:5: prompt is 3" in record.getMessage()


TWICE = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "a", "answer": 2}]


def test_repeated_prompts_are_told_and_kept_dropped_or_refused(tmp_path, caplog):
    path = write_rows(tmp_path / "x.jsonl", *TWICE)
    with caplog.at_level(logging.WARNING, "headway.sources"):
        kept = load_source("files", options={"path": path}, seed=0)
        dropped = load_source("files", options={"path": path, "duplicates": "drop"}, seed=0)
    assert len({prompt.prompt_id for prompt in kept.next(3)}) == 3
    assert {(p.text, p.answer) for p in dropped.next(4)} == {("a", "1"), ("b", None)}
    assert [record.getMessage() for record in caplog.records] == [
        f"1 rows were {what}: {path}:3: the prompt of row 1 again" for what in ("kept", "left out")
    ]
    with pytest.raises(InputError, match=r"x\.jsonl:3: the prompt of row 1 again"):
        texts(path, 1, duplicates="refuse")


def test_prompts_of_other_lengths_are_left_out_and_counted(tmp_path, caplog):
    path = write_rows(tmp_path / "x.jsonl", *({"prompt": "x" * length} for length in range(1, 10)))
    with caplog.at_level(logging.WARNING, "headway.sources"):
        result = texts(path, 30, min_characters=3, max_characters=5)
    assert result == {"xxx", "xxxx", "xxxxx"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: 2 prompts shorter than min_characters left out",
        f"{path}: 4 prompts longer than max_characters left out",
    ]
    with pytest.raises(InputError, match=r"no prompts; .*9 prompts shorter"):
        texts(path, 1, min_characters=100)


def test_shards_share_out_the_training_rows_and_hold_out_the_same(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", *({"prompt": str(number)} for number in range(20)))

    def draw(index, split):
        options = {"path": path, "shard": [index, 3]}
        source = load_source("files", options=options, seed=0, split=split, heldout_size=2)
        return {prompt.text for prompt in source.next(40)}

    shards = [draw(index, "train") for index in range(3)]
    held_out = draw(0, "heldout")
    assert sorted(len(shard) for shard in shards) == [6, 6, 6]
    assert set().union(*shards) | held_out == {str(number) for number in range(20)}
    assert held_out == draw(1, "heldout")


def test_fields_may_have_other_names_and_others_become_metadata(tmp_path):
    row = {"question": "1+1", "solution": 2, "level": 3, "metadata": {"kind": "sum"}}
    path = write_rows(tmp_path / "x.jsonl", row)
    named = {"path": path, "prompt_field": "question", "answer_field": "solution"}
    with pytest.raises(InputError, match=r"unknown fields level; .*or set other_fields$"):
        load_source("files", options=named, seed=0)
    for other, metadata in (("ignore", {}), ("metadata", {"level": 3})):
        source = load_source("files", options={**named, "other_fields": other}, seed=0)
        (prompt,) = source.next(1)
        assert (prompt.text, prompt.answer) == ("1+1", "2")
        assert prompt.metadata == {**metadata, "kind": "sum"}


def test_a_column_that_is_ignored_may_have_the_name_of_a_field_of_the_metadata(tmp_path):
    row = {"prompt": "a", "level": 1, "metadata": {"level": 2}}
    options = {"path": write_rows(tmp_path / "x.jsonl", row), "other_fields": "ignore"}
    [prompt] = load_source("files", options=options, seed=0).next(1)
    assert prompt.metadata == {"level": 2}


def test_columns_that_are_not_json_are_bad_rows(tmp_path):
    table = pa.table({"prompt": ["a"], "when": pa.array([0], pa.timestamp("s"))})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InputError, match=r"x\.parquet:1: what becomes metadata is not JSON"):
        texts(str(tmp_path / "x.parquet"), 1, other_fields="metadata")


def test_a_conversation_opens_an_episode_as_it_is(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = write_rows(tmp_path / "x.jsonl", {"prompt": messages, "answer": 2})
    (prompt,) = load_source("files", options={"path": path}, seed=0).next(1)
    assert prompt.text == "Be brief.\n\n1+1?"
    result = asyncio.run(SingleTurn().reset(prompt))
    assert [(message.role, message.content) for message in result] == [
        ("system", "Be brief."),
        ("user", "1+1?"),
    ]


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
def test_a_damaged_table_is_an_input_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="cannot be read"):
        texts(str(tmp_path / name), 1)


def test_data_sets_without_their_library_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'headway-rl\[datasets\]'"):
        load_source("datasets:openai/gsm8k", options={}, seed=0)


def test_a_folder_of_data_sets_is_read_like_a_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]
    parts = {"train": rows, "test": rows[:3]}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(result) for name, result in parts.items()}
    )
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "plain").mkdir()
    for name, result in parts.items():
        write_rows(tmp_path / "plain" / f"{name}.jsonl", *result)
    for folder in ("saved", "plain"):
        options = {"prompt_field": "question", "heldout_split": "test"}
        drawn = {
            split: {
                (prompt.text, prompt.answer)
                for prompt in load_source(
                    f"datasets:{tmp_path / folder}",
                    options=options, seed=0, split=split, heldout_size=3,
                ).next(40)
            }
            for split in ("train", "heldout")
        }  # fmt: skip
        assert drawn["heldout"] == {(f"{i}+{i}", str(2 * i)) for i in range(3)}
        assert drawn["train"] == {(f"{i}+{i}", str(2 * i)) for i in range(3, 20)}
    with pytest.raises(InputError, match="split 'valid'"):
        load_source(f"datasets:{tmp_path / 'saved'}", options={"split": "valid"}, seed=0)


def test_a_column_called_messages_is_metadata_and_not_the_prompt(tmp_path):
    row = {"prompt": "asked", "messages": [{"role": "user", "content": "another"}]}
    path = write_rows(tmp_path / "x.jsonl", row)
    options = {"path": path, "other_fields": "metadata"}
    (prompt,) = load_source("files", options=options, seed=0).next(1)
    (message,) = asyncio.run(SingleTurn().reset(prompt))
    assert (message.role, message.content) == ("user", "asked")
    assert prompt.metadata == {"messages": row["messages"]}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (408, "408"), (408.0, "408"), (0.5, "0.5"), ("408.0", "408.0"),
        pytest.param(10**400, f"1{'0' * 400}", id="larger than a float"),
    ],
)  # fmt: skip
def test_a_whole_number_is_an_answer_without_a_point(tmp_path, answer, text):
    path = write_rows(tmp_path / "x.jsonl", {"prompt": "a", "answer": answer})
    [prompt] = load_source("files", options={"path": path}, seed=0).next(1)
    assert prompt.answer == text


DEEP = '{"a": ' * 900 + "1" + "}" * 900
NO_MESSAGES = ([], ["x"], [{"role": "user"}], [{"role": "boss", "content": "x"}],
               [{"role": "user", "content": 1}])  # fmt: skip
UNENCODABLE = (
    {"prompt": "a\ud800"}, {"prompt": "a\0b"}, {"prompt": "a", "answer": "\udfff"},
    {"prompt": "a", "metadata": {"k": [{"x": "\ud800"}]}},
    {"prompt": "a", "metadata": {"\ud800": 1}}, {"prompt": "a", "\ud800": 1},
    {"prompt": [{"role": "user", "content": "\ud800"}]},
)  # fmt: skip
BAD_ROWS = [
    ("{", "not JSON"), ("[1]", "found list"),
    ({"prompt": ""}, "not empty"), ({"prompt": 3}, "prompt is 3"),
    ({"prompt": "[{'role': 'user', 'content': 'q'}]"}, "must be the list itself"),
    ({"prompt": [{"role": "user", "content": ""}]}, "not empty"),
    ({"answer": "3"}, "there is no field prompt"),
    ({"prompt": "a", "metadata": 1}, "metadata is 1"),
    ({"prompt": "a", "anwser": "b"}, "unknown fields anwser.* did you mean 'answer'"),
    ({"prompt": "a", "metadata": {"headway:messages": []}}, "has 'headway:messages', which only"),
    *(({"prompt": "b", "answer": answer}, "answer is .*, must be a string or a number")
      for answer in (True, float("nan"), float("-inf"), ["b"])),
    *(({"prompt": prompt}, "must be a text or messages") for prompt in NO_MESSAGES),
    *((row, r"has a (lone surrogate, U\+D|NUL)") for row in UNENCODABLE),
    *((f'{{"prompt": "b", "{field}": {DEEP}}}', "") for field in ("prompt", "answer", "metadata")),
]  # fmt: skip


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=lambda value: ascii(value)[:40])
def test_a_bad_row_is_refused_by_its_number_or_left_out(tmp_path, row, message):
    path = write_rows(tmp_path / "bad.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(InputError, match=rf"bad\.jsonl:2: .*{message}") as caught:
        texts(path, 1)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 9000
    assert texts(path, 1, bad_rows="skip") == {"fine"}


LOST = {
    r"$\frac{1}{2}$": r'''U+000C at 1: JSON reads "\frac" so, and LaTeX needs "\\frac" there''',
    r"\boxed{5}": r'''U+0008 at 0: JSON reads "\boxed" so''',
    r"a \begin{align}": r'"\begin"', r"x\b": "U+0008 at 1", r"\n\forall x": r'"\forall"',
    r"3 \times 4": r'"\times"', r"\theta$": r'"\theta"', r"5\text{ cm}": r'"\text"',
    r"\tfrac{1}{2}": r'"\tfrac"', r"\nabla f": r'"\nabla"', r"1 \notin A": r'"\notin"',
    r"\\left(1\right)": r'"\right"', r"\rho = 1": r'"\rho"', r"\u000bec{x}": r'"\vec"',
    r"if $x \neq 1$": r'"\neq"', r"$a$, $\nu$.": r'"\nu"', r"$ 2\tan x$": r'"\tan"',
    r"\u0007lpha": r'"\alpha"', r"\u001bnd{x}": r'"\end"', r"\u0001": "U+0001 at 0",
}  # fmt: skip
"""Texts as a file has them, and what the message says."""
TEXTS = (
    "a\tb", "\tan\tapple", "to\teq", "\ttext = 1\n\tfrac = 2", "one line\nan apple\neq 6\nu",
    "a\r\nb\r\n", "old\rMac\rwith an\rangle", "last line\n\fpage 2", "end of page\f\n2",
    "costs $5\nu paid $6", "for x in $all\ni=$((i + 1))",
    "\x1b[31mred\x1b[0m", r"$\frac{1}{2} \times \text{a}$", "\x7f\x85",
)  # fmt: skip
ROWS_WITH = {
    "prompt": '{"prompt": "%s"}',
    "answer": '{"prompt": "a", "answer": "%s"}',
    "messages": '{"messages": [{"role": "user", "content": "%s"}]}',
    "completion": '{"prompt": "a", "completion": "%s"}',
}


@pytest.mark.reported("json_latex_escapes")
@pytest.mark.parametrize("field", ROWS_WITH)
def test_latex_that_lost_a_backslash_is_refused_by_its_row_and_ordinary_texts_are_read(
    tmp_path, field
):
    def read(written):
        fine, row = {"prompt": "b", "completion": "c"}, ROWS_WITH[field] % written
        if field != "completion":
            return texts(write_rows(tmp_path / "x.jsonl", {"prompt": "b"}, row), 2)
        path = write_rows(tmp_path / "x.jsonl", fine, row)
        return load_examples(DEMONSTRATIONS, path, options={}, seed=0, heldout=frozenset())

    for written, problem in LOST.items():
        with pytest.raises(InputError, match=r"x\.jsonl:2: ") as caught:
            read(written)
        assert problem in str(caught.value)
    for text in TEXTS:
        read(json.dumps(text)[1:-1])


@pytest.mark.parametrize("column", ["prompt", "answer", "metadata"])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_that_is_not_utf_8_is_refused_by_the_number_of_its_row(tmp_path, column, suffix):
    def strings(*values):
        offsets = pa.py_buffer(b"".join(
            sum(map(len, values[:n])).to_bytes(4, "little") for n in range(len(values) + 1)
        ))  # fmt: skip
        buffers = [None, offsets, pa.py_buffer(b"".join(values))]
        return pa.Array.from_buffers(pa.string(), len(values), buffers)

    bad, good = strings(b"a", b"caf\xe9", b"c"), strings(b"a", b"b", b"c")
    columns = {"prompt": good, "answer": good, "metadata": good, column: bad}
    columns["metadata"] = pa.StructArray.from_arrays([columns["metadata"]], names=["k"])
    path, table = tmp_path / f"x.{suffix}", pa.table(columns)
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    with pytest.raises(InputError, match=rf"x\.{suffix}:2: not UTF-8"):
        texts(str(path), 1)
    assert texts(str(path), 2, bad_rows="skip") == {"a", "c"}


def test_byte_order_marks_are_read_or_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r')  # as Windows ends lines
    assert texts(str(path), 2) == {"a", "b"}
    path.write_bytes(b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"x\.jsonl:2: not JSON: .*BOM"):
        texts(str(path), 1)
    path.write_text('{"prompt": "a"}\n', encoding="utf-16")
    with pytest.raises(InputError, match="byte order mark of UTF-16; must be UTF-8"):
        texts(str(path), 1)
