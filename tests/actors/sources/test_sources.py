"""The contract of prompt sources: repeatable, resumable, and training apart from held-out."""

import json

import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from row_files import write_rows

from actors.sources import reasoning_gym as gym
from actors.sources.load_source import load_source
from headway.errors import InputError

HELD_OUT = 20


def lines(count):
    return [{"prompt": f"{i}+{i}=", "answer": 2 * i, "metadata": {"line": i}} for i in range(count)]


def opened(path, **keywords):
    return load_source("files", options={"path": path}, **{"seed": 0, **keywords})


def write_table(path, rows):
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        new = pa.ipc.new_stream if path.stem == "stream" else pa.ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table)
    return str(path)


TABLES = ("sums.parquet", "sums.arrow", "stream.arrow", "sums.feather")
OTHERS = ("mixture", "lettered_chain_sum", "tiny:product", "reasoning_gym:chain_sum", "gym:small")


@pytest.fixture(params=["files", *TABLES, *OTHERS])
def open_source(request, tmp_path):
    """Return a function that opens the source of the parameter with some keywords."""
    name, options = request.param, {}
    if name == "files":
        options = {"path": write_rows(tmp_path / "sums.jsonl", *lines(100))}
    if name in TABLES:
        rows = [{**line, "answer": str(line["answer"])} for line in lines(100)]
        name, options = "files", {"path": write_table(tmp_path / name, rows)}
    if name == "mixture":
        options = {
            "parts": [
                {"source": "reasoning_gym:chain_sum", "weight": [[0, 1.0], [100, 0.0]]},
                {"source": "lettered_chain_sum", "weight": [[0, 0.0], [100, 2.0]]},
            ]
        }
    if name == "gym:small":
        name, options = "reasoning_gym:chain_sum", {
            "min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2,
        }  # fmt: skip

    def build(**changes):
        keywords = {"seed": 0, "split": "train", "heldout_size": HELD_OUT, **changes}
        return load_source(name, options=options, **keywords)

    return build


def test_the_same_arguments_give_the_same_prompts(open_source):
    assert open_source().next(150) == open_source().next(150)


def test_another_seed_gives_other_prompts_but_the_same_held_out_ones(open_source):
    assert open_source(seed=1).next(30) != open_source(seed=2).next(30)
    one, two = (open_source(seed=seed, split="heldout").next(HELD_OUT) for seed in (1, 2))
    assert one == two


def test_a_restored_cursor_continues_as_if_nothing_had_happened(open_source):
    whole = open_source().next(250)
    first = open_source()
    assert first.next(117) == whole[:117]
    resumed = open_source()
    resumed.restore(first.cursor())
    assert resumed.next(60) == whole[117:177]
    json.loads(first.cursor())


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_training_never_draws_a_held_out_problem(open_source, seed):
    held_out = {prompt.text for prompt in open_source(split="heldout").next(HELD_OUT)}
    trained = {prompt.text for prompt in open_source(seed=seed).next(400)}
    assert len(held_out) == HELD_OUT
    assert not held_out & trained
    assert len(trained) > 40


def test_prompt_ids_name_source_epoch_and_index_and_differ(open_source):
    prompts = open_source().next(150)
    ids = [prompt.prompt_id for prompt in prompts]
    assert len(set(ids)) == 150
    assert all(len(prompt_id.split("/")) == 3 for prompt_id in ids)
    held_out = open_source(split="heldout").next(HELD_OUT)
    assert not {prompt.prompt_id for prompt in held_out} & set(ids)


def test_prompts_have_answers_and_metadata_that_is_json(open_source):
    for prompt in open_source().next(10):
        assert prompt.answer
        assert json.loads(json.dumps(dict(prompt.metadata))) == prompt.metadata


def test_the_seeds_of_two_runs_and_of_held_out_problems_cannot_meet():
    sources = [gym.ReasoningGymSource("chain_sum", options={}, seed=seed) for seed in (0, 1)]
    first_seeds = [0, *(source.first_seed for source in sources)]
    assert first_seeds == [0, 10**8, 2 * 10**8]


def test_a_gym_epoch_goes_over_into_the_next_without_repeating():
    class ShortEpochs(gym.ReasoningGymSource):
        EPOCH = 3

    prompts = ShortEpochs("chain_sum", options={}, seed=5).next(8)
    assert [p.prompt_id for p in prompts][2:5] == [
        "chain_sum/0/2", "chain_sum/1/0", "chain_sum/1/1",
    ]  # fmt: skip
    assert len({p.text for p in prompts}) == 8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:chian_sum", {}, "chian_sum"),
        ("reasoning_gym:chain_sum", {"terms": 3}, "terms"),
        ("reasoning_gym:chain_sum", {"seed": 3}, "seed cannot be options"),
        ("reasoning_gym:chain_sum", {"min_terms": 0}, "min_terms"),
        ("lettered_chain_sum", {"terms": 3}, "no options"),
        ("files", {}, "requires the option path"),
        ("files", {"path": "x", "shuffle": True}, "no option shuffle"),
        ("files", {"pth": "x"}, "no option pth; its options: .*; did you mean 'path'"),
        ("files", {"path": "/nonexistent.jsonl"}, "cannot be read"),
        ("files", {"path": "x.xlsx"}, r"must end in \.jsonl, \.parquet"),
        ("files", {"path": "x", "shard": [3, 3]}, r"must be \[i, n\]"),
        ("files", {"path": "x", "duplicates": "maybe"}, "duplicates = 'maybe'"),
        ("files", {"path": "x", "min_characters": -1}, "min_characters = -1"),
        ("files", {"path": "x", "colour": 1}, "no option colour; its options: .*prompt_field"),
        ("reasoning_gym:chain_sum", {"level": -1}, "from 0"),
        ("reasoning_gym:chain_sum", {"level": 99}, "from 0 to 10"),
        ("reasoning_gym:chain_sum", {"level": "x"}, "whole"),
        ("tiny:sum", {}, "the tasks are product, distance, twice"),
        ("user_module:Countdown", {}, "Countdown"),
        ("mixture", {}, "requires the option parts"),
        ("mixture", {"parts": []}, "at least 1 item"),
        ("mixture", {"parts": [{"source": "a"}], "seed": 1}, "no option seed; its options: parts"),
        ("mixture", {"parts": [{"weight": 1}]}, "source"),
        ("mixture", {"parts": [{"source": "nothing"}]}, "expected one of files"),
        ("mixture", {"parts": ["lettered_chain_sum"]}, "parts"),
        ("mixture", {"parts": [{"source": "tiny:twice", "weight": -1}]}, "0 or more"),
        ("mixture", {"parts": [{"source": "tiny:twice", "weight": [[5, 1], [5, 2]]}]}, "rising"),
        ("mixture", {"parts": [{"source": "tiny:twice", "weight": 0}]}, "are 0 at prompt 0"),
        ("mixture", {"parts": [{"source": "tiny:twice", "weight": [[0, 1], [9, 0]]}]}, "prompt 9"),
        ("mixture", {"parts": [{"source": "tiny:twice", "name": "a/b"}]}, "no '/'"),
    ],
)
def test_a_wrong_source_or_option_is_one_clear_input_error(name, options, message):
    with pytest.raises(InputError, match=message):
        load_source(name, options=options, seed=0)


def test_a_task_without_enough_problems_is_refused_instead_of_searched_for_ever():
    class Impatient(gym.ReasoningGymSource):
        PATIENCE = 200

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(InputError, match="too few different problems"):
        Impatient("chain_sum", options=options, seed=0, heldout_size=1000)


def test_a_source_of_the_users_is_built_with_the_same_keywords():
    source = load_source(
        "user_module:Threes", options={"a": 1}, seed=4, split="heldout", heldout_size=9
    )
    assert source.arguments == ({"a": 1}, 4, "heldout", 9)
    assert [prompt.text for prompt in source.next(2)] == ["3", "3"]


def test_every_epoch_of_a_file_has_every_line_once_in_an_order_of_its_own(tmp_path):
    path = write_rows(tmp_path / "sums.jsonl", *lines(50))
    source = opened(path, seed=3)
    first, second = source.next(50), source.next(50)
    texts = [[prompt.text for prompt in epoch] for epoch in (first, second)]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(row["prompt"] for row in lines(50))
    assert texts[0] != texts[1]
    assert {prompt.prompt_id.split("/")[1] for prompt in second} == {"1"}


def test_a_line_keeps_its_answer_as_text_and_its_metadata(tmp_path):
    path = write_rows(tmp_path / "one.jsonl", *lines(1), "", {"prompt": "open"})
    prompts = opened(path).next(2)
    by_text = {prompt.text: prompt for prompt in prompts}
    assert by_text["0+0="].answer == "0"
    assert by_text["0+0="].metadata == {"line": 0}
    assert by_text["open"].answer is None
    assert by_text["open"].prompt_id == "one/0/3"


def test_what_is_held_out_of_a_file_does_not_depend_on_the_order_of_its_lines(tmp_path):
    there = write_rows(tmp_path / "a.jsonl", *lines(60))
    back = write_rows(tmp_path / "b.jsonl", *lines(60)[::-1])
    texts = [
        [prompt.text for prompt in opened(path, split="heldout", heldout_size=9).next(9)]
        for path in (there, back)
    ]
    assert texts[0] == texts[1]


def test_lines_that_repeat_a_held_out_text_are_not_trained(tmp_path):
    path = write_rows(tmp_path / "twice.jsonl", *lines(10), *lines(10))
    held_out, trained = (
        opened(path, split=split, heldout_size=9).next(9) for split in ("heldout", "train")
    )
    assert len({prompt.text for prompt in held_out}) == 9
    assert len({prompt.text for prompt in trained}) == 1
    assert not {prompt.text for prompt in held_out} & {prompt.text for prompt in trained}


def test_a_second_file_holds_out_and_its_texts_are_not_trained(tmp_path):
    options = {
        "path": write_rows(tmp_path / "train.jsonl", *lines(10)),
        "heldout_path": write_rows(tmp_path / "test.jsonl", *lines(3)),
    }
    held_out = load_source("files", options=options, seed=0, split="heldout", heldout_size=3)
    trained = load_source("files", options=options, seed=0, heldout_size=3)
    assert {prompt.text for prompt in held_out.next(3)} == {"0+0=", "1+1=", "2+2="}
    assert {prompt.text for prompt in trained.next(7)} == {f"{i}+{i}=" for i in range(3, 10)}


def test_a_file_without_prompts_or_with_too_few_is_refused(tmp_path):
    with pytest.raises(InputError, match="no prompts"):
        opened(write_rows(tmp_path / "empty.jsonl", "", ""))
    path = write_rows(tmp_path / "few.jsonl", *lines(5))
    with pytest.raises(InputError, match="6 prompts cannot be held out of 5"):
        opened(path, heldout_size=6)
    with pytest.raises(InputError, match="nothing is left"):
        opened(path, heldout_size=5)
