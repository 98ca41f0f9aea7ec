"""Demonstrations for a warm start: from the demo's source and from files."""

import json
from itertools import islice

import pyarrow
import pytest
from pyarrow import parquet

from actors.environments.protocol import Message
from actors.sources.examples import DEMONSTRATIONS, load_examples
from actors.sources.lettered_chain_sum import CHARACTERS, LetteredChainSum
from headway.errors import InputError


def load(name, seed=0, heldout=frozenset(), **options):
    return load_examples(DEMONSTRATIONS, name, options=options, seed=seed, heldout=heldout)


def value(prompt):
    """Evaluate a prompt such as `a3b+5c-7=`, without its letters."""
    return eval("".join(c for c in prompt[:-1] if not c.isalpha()))


def test_every_demonstration_is_right_and_a_share_of_them_is_worked():
    pairs = list(islice(load("lettered_chain_sum", worked_share=0.4), 2000))
    for prompt, completion in pairs:
        assert int(completion.rsplit("=", 1)[1]) == value(prompt)
        assert set(prompt + completion) <= set(CHARACTERS)
    worked = [completion for _, completion in pairs if not completion.startswith("=")]
    assert 0.36 < len(worked) / len(pairs) < 0.44


def test_a_worked_answer_adds_one_term_at_a_time():
    pairs = dict(islice(load("lettered_chain_sum", worked_share=1.0), 500))
    for prompt, completion in pairs.items():
        steps = completion.split(",")
        assert len(steps) == sum(c.isalpha() for c in prompt) - 1
        for step in steps:
            left, right = step[1:].split("=")
            assert eval(left) == int(right)


def test_demonstrations_and_training_never_show_a_held_out_problem():
    heldout = {
        p.text for p in LetteredChainSum(seed=0, split="heldout", heldout_size=300).next(300)
    }
    assert len(heldout) == 300
    for seed in (0, 1):
        source = LetteredChainSum(seed=seed, heldout_size=300)
        training = {prompt.text for prompt in source.next(5000)}
        shown = {prompt for prompt, _ in islice(source.demonstrations(), 5000)}
        assert not heldout & (training | shown)


def test_held_out_problems_are_the_same_for_every_seed_and_training_ones_are_not():
    heldout = [LetteredChainSum(seed=s, split="heldout", heldout_size=50).next(50) for s in (0, 7)]
    assert heldout[0] == heldout[1]
    training = [[p.text for p in LetteredChainSum(seed=s).next(200)] for s in (0, 7)]
    assert len(set(training[0]) & set(training[1])) < 40


def test_a_restored_source_continues_with_the_same_prompts():
    source = LetteredChainSum(seed=3, heldout_size=50)
    source.next(70)
    cursor = source.cursor()
    other = LetteredChainSum(seed=3, heldout_size=50)
    other.restore(cursor)
    assert other.next(50) == source.next(50)


def test_lengths_are_heavy_tailed():
    terms = [sum(c.isalpha() for c in p.text) for p in LetteredChainSum(seed=0).next(4000)]
    assert (min(terms), max(terms)) == (3, 18)
    assert 0.2 < terms.count(3) / len(terms) < 0.26
    assert 0.04 < sum(n >= 14 for n in terms) / len(terms) < 0.1


def test_a_file_is_shuffled_anew_every_epoch_and_never_ends(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "completion": "{i}"}}\n' for i in range(50)))
    pairs = list(islice(load(str(path)), 100))
    assert sorted(pairs[:50]) == sorted(pairs[50:])
    assert pairs[:50] != pairs[50:]
    assert pairs == list(islice(load(str(path)), 100))


def test_a_file_shows_no_held_out_prompt(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "completion": "x"}}\n' for i in range(5)))
    shown = [prompt for prompt, _ in islice(load(str(path), heldout=frozenset("024")), 4)]
    assert sorted(shown) == ["1", "1", "3", "3"]
    with pytest.raises(InputError, match="every prompt is held out"):
        load(str(path), heldout=frozenset("01234"))


def test_a_source_shows_no_held_out_prompt_and_holds_out_as_many_itself():
    pairs = list(islice(load("user_module:Shown", heldout=frozenset("024"), first=0), 9))
    assert pairs == [(digit, "3") for digit in "135678913"]
    with pytest.raises(InputError, match="10000 prompts in a row were held out"):
        next(load("user_module:Shown", heldout=frozenset("0123456789"), first=0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "lettered_chain_sum",
            {"worked_shar": 1},
            "no option worked_shar; .*worked_share",
        ),
        ("user_module:Shown", {"first": 0, "last": 3}, "no option last; its options: first, step"),
        ("user_module:Shown", {}, "requires the option first"),
        ("pairs.jsonl", {"worked_share": 1}, "no option worked_share; its options: none"),
    ],
)
def test_an_option_that_the_demonstrations_lack_is_named(name, options, message):
    with pytest.raises(InputError, match=message):
        load(name, **options)


TALK = [
    {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"},
    {"role": "assistant", "content": "b"},
]  # fmt: skip
READ = tuple(Message(**message) for message in TALK)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_messages_is_conversations(tmp_path, suffix):
    """Other columns, and fields of a message that are null, do not matter."""
    path = tmp_path / f"talks.{suffix}"
    talk = [{**message, "name": None, "tool_calls": None} for message in TALK]
    rows = [{"id": i, "messages": talk} for i in range(2)]
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert next(load(str(path))) == (READ[:2], READ[2:])
    with pytest.raises(InputError, match="every prompt is held out"):
        load(str(path), heldout=frozenset(["s\n\nu"]))


def test_the_prompt_of_a_pair_may_be_messages(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": TALK[:2], "completion": "a"}))
    assert next(load(str(path))) == (READ[:2], "a")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "must be messages, each of a role (system, user, assistant, tool) and a content"),
        ([{"role": "bot", "content": "a"}], "must be messages, each of a role"),
        ([*TALK, {"role": "assistant", "content": None, "tool_calls": [1]}], "must be messages"),
        ("hello", "must be a tuple of the strings prompt, completion"),
        (TALK[:2], "messages of system, user must begin with another role than the assistant's"),
        (TALK[2:], "messages of assistant, tool, assistant must begin with another role"),
        (TALK[:4], "and end with the assistant"),
        ([TALK[1], {"role": "assistant", "content": ""}], "no message of the assistant may be emp"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_refused_with_its_line(
    tmp_path, messages, expected
):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": messages}))
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert f"{path}:2: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no demonstrations"),
        ("{", "pairs.jsonl:1: expected an object"),
        (
            '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}',
            "pairs.jsonl:2: expected an object",
        ),
        ('{"prompt": "a", "completion": ""}', "only the prompt may be empty"),
        ('{"prompt": 3, "completion": "b"}', "must be a tuple of the strings prompt, completion"),
        ('{"prompt": "a", "completion": "\\ud800"}', "pairs.jsonl:1: a text has a lone surrogate"),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "b\\u0000"}]}',
            "pairs.jsonl:1: a text has a NUL character at 1",
        ),
        (
            '{"prompt": ' + "[" * 900 + "]" * 900 + ', "completion": "b"}',
            "must be a tuple of the strings prompt, completion",
        ),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, content, expected):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"pairs\.jsonl") as caught:
        load(str(path))
    assert expected in str(caught.value)


def test_a_source_without_worked_examples_is_refused():
    with pytest.raises(InputError, match="has no worked examples"):
        load("reasoning_gym:chain_sum")
