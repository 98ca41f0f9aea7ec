"""Demonstrations and preference pairs: from the demo's source, from files, from a user's source."""

from functools import partial
from itertools import islice

import pyarrow
import pytest
from pyarrow import parquet
from row_files import write_rows

from actors.environments.protocol import Message
from actors.sources.examples import (
    DEMONSTRATIONS,
    HELDOUT_DEMONSTRATIONS,
    LABELLED_STEPS,
    load_examples,
    mix_examples,
    read_examples,
)
from actors.sources.lettered_chain_sum import CHARACTERS, LetteredChainSum
from actors.sources.preferences import PREFERENCES
from headway.errors import InputError


def load(kind, name, seed=0, heldout=frozenset(), **options):
    return load_examples(kind, str(name), options=options, seed=seed, heldout=heldout)


demonstrations, preferences = partial(load, DEMONSTRATIONS), partial(load, PREFERENCES)


def value(prompt):
    """Evaluate a prompt such as `a3b+5c-7=`, without its letters."""
    return eval("".join(c for c in prompt[:-1] if not c.isalpha()))


def test_every_demonstration_is_right_and_a_share_of_them_is_worked():
    pairs = list(islice(demonstrations("lettered_chain_sum", worked_share=0.4), 2000))
    for prompt, completion in pairs:
        assert int(completion.rsplit("=", 1)[1]) == value(prompt)
        assert set(prompt + completion) <= set(CHARACTERS)
    worked = [completion for _, completion in pairs if not completion.startswith("=")]
    assert 0.36 < len(worked) / len(pairs) < 0.44


def test_lengths_are_heavy_tailed():
    terms = [sum(c.isalpha() for c in p.text) for p in LetteredChainSum(seed=0).next(4000)]
    assert (min(terms), max(terms)) == (3, 18)
    assert 0.2 < terms.count(3) / len(terms) < 0.26
    assert 0.04 < sum(n >= 14 for n in terms) / len(terms) < 0.1


def steps_are_right(prompt, completion):
    """Return True if a worked answer has a right step for each term, one after the other."""
    terms = [prompt[1], *(prompt[i : i + 2] for i in range(3, len(prompt) - 1, 3))]
    letters = [c for c in prompt if c.isalpha()]
    expected, total = [], int(terms[0])
    for letter, term in zip(letters[1:], terms[1:], strict=True):
        expected.append(f"{letter}{total}{int(term):+d}={total + int(term)}")
        total += int(term)
    return completion == ",".join(expected)


def test_the_better_answer_is_worked_and_right_and_the_worse_one_is_not():
    for prompt, chosen, rejected in islice(preferences("lettered_chain_sum"), 2000):
        assert set(prompt + chosen + rejected) <= set(CHARACTERS)
        assert steps_are_right(prompt, chosen)
        assert int(chosen.rsplit("=", 1)[1]) == value(prompt)
        assert not steps_are_right(prompt, rejected)


def test_worse_answers_are_guesses_or_worked_with_a_step_that_is_wrong_or_missing():
    pairs = list(islice(preferences("lettered_chain_sum", guess_share=0.25), 2000))
    guesses = [(p, r) for p, _, r in pairs if r.startswith("=")]
    assert 0.21 < len(guesses) / len(pairs) < 0.29
    right = sum(int(guess[1:]) == value(prompt) for prompt, guess in guesses)
    assert 0.08 < right / len(guesses) < 0.21
    worked = [(chosen, r) for _, chosen, r in pairs if not r.startswith("=")]
    missing = sum(r.count(",") == chosen.count(",") - 1 for chosen, r in worked)
    wrong = sum(r.count(",") == chosen.count(",") for chosen, r in worked)
    assert missing + wrong == len(worked)
    assert 0.4 < missing / len(worked) < 0.6


@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_demonstrations_and_training_are_of_different_problems_none_held_out(seed):
    heldout = frozenset(
        p.text for p in LetteredChainSum(seed=0, split="heldout", heldout_size=300).next(300)
    )
    assert len(heldout) == 300
    source = LetteredChainSum(seed=seed, heldout_size=300)
    training = {p.text for p in source.next(5000)}
    shown = {p for p, _ in islice(source.demonstrations(), 5000)}
    result = preferences("lettered_chain_sum", heldout=heldout, seed=seed)
    pairs = {p for p, _, _ in islice(result, 3000)}
    assert not heldout & (training | shown | pairs)
    assert not {p for p in pairs if len(p) > 20} & (training | shown)


def test_a_seed_has_its_own_pairs_and_always_the_same():
    first = list(islice(preferences("lettered_chain_sum", seed=3), 50))
    assert first == list(islice(preferences("lettered_chain_sum", seed=3), 50))
    assert not {p for p, _, _ in first} & {
        p for p, _, _ in islice(preferences("lettered_chain_sum", seed=4), 50) if len(p) > 20
    }


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(DEMONSTRATIONS, {"completion": "x"}), (PREFERENCES, {"chosen": "a\u2028", "rejected": "b"})],
)
def test_a_file_is_shuffled_anew_every_epoch_and_shows_no_held_out_prompt(tmp_path, kind, fields):
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": str(i), **fields} for i in range(30)))
    heldout = frozenset(["0", "1"])
    examples = list(islice(load(kind, path, heldout=heldout), 56))
    assert sorted(examples[:28]) == sorted(examples[28:])
    assert examples[:28] != examples[28:]
    assert sorted(examples[:28]) == sorted((str(i), *fields.values()) for i in range(2, 30))
    assert examples == list(islice(load(kind, path, heldout=heldout), 56))
    with pytest.raises(InputError, match="every prompt is held out"):
        load(kind, path, heldout=frozenset(map(str, range(30))))


def test_a_file_may_be_named_by_its_path_or_as_the_option_of_files(tmp_path):
    path = write_rows(tmp_path / "rows.JSONL", {"prompt": "a", "completion": "b"})
    assert next(demonstrations(path)) == next(demonstrations("files", path=path)) == ("a", "b")
    with pytest.raises(InputError, match="no option split"):
        demonstrations("files", path=path, split="train")


def test_several_sources_are_mixed_by_weights_each_in_its_own_order(tmp_path):
    rows = [{"prompt": f"{i}", "completion": "x"} for i in range(40)]
    first = write_rows(tmp_path / "a.jsonl", *rows[:20])
    second = write_rows(tmp_path / "b.jsonl", *rows[20:])
    parts = [(str(first), {}, 3.0), (str(second), {}, 1.0)]
    heldout = frozenset(["5", "25"])
    mixed = list(islice(mix_examples(DEMONSTRATIONS, parts, seed=1, heldout=heldout), 2000))
    assert mixed == list(islice(mix_examples(DEMONSTRATIONS, parts, seed=1, heldout=heldout), 2000))
    of_first = [example for example in mixed if int(example[0]) < 20]
    assert 0.72 < len(of_first) / len(mixed) < 0.78
    assert of_first == list(islice(demonstrations(first, 1, heldout), len(of_first)))
    assert not heldout & {prompt for prompt, _ in mixed}
    alone = mix_examples(DEMONSTRATIONS, parts[:1], seed=1, heldout=heldout)
    assert list(islice(alone, 50)) == of_first[:50]


def test_examples_of_a_file_are_read_in_their_order_and_a_source_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": p, "completion": "x"} for p in "cab"))
    read = read_examples(HELDOUT_DEMONSTRATIONS, str(path), {})
    assert [prompt for prompt, _ in read] == ["c", "a", "b"]
    with pytest.raises(InputError, match=r"sft\.heldout = 'lettered_chain_sum' must be a file"):
        read_examples(HELDOUT_DEMONSTRATIONS, "lettered_chain_sum", {})


def test_a_source_shows_no_held_out_prompt_and_holds_out_as_many_itself():
    pairs = list(islice(demonstrations("user_module:Shown", heldout=frozenset("024"), first=0), 9))
    assert pairs == [(digit, "3") for digit in "135678913"]
    with pytest.raises(InputError, match="10000 prompts in a row were held out"):
        next(demonstrations("user_module:Shown", heldout=frozenset("0123456789"), first=0))


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
        write_rows(path, *rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert next(demonstrations(path)) == (READ[:2], READ[2:])
    for prompt in ("s\n\nu", "s\n\nu\n\na\n\nt"):
        with pytest.raises(InputError, match="every prompt is held out"):
            demonstrations(path, heldout=frozenset([prompt]))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(DEMONSTRATIONS, {"completion": "a"}), (PREFERENCES, {"chosen": "a", "rejected": "b"})],
)
def test_the_prompt_of_an_example_may_be_messages(tmp_path, kind, fields):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": TALK[:2], **fields})
    assert next(load(kind, path)) == (READ[:2], *fields.values())


@pytest.mark.parametrize(
    "row", [{"prompt": "u", "completion": "a"}, {"messages": TALK[1:3]}], ids=["prompt", "messages"]
)
def test_a_column_of_system_messages_begins_the_prompt(tmp_path, row):
    path = write_rows(tmp_path / "rows.jsonl", {**row, "system": "s"})
    prompt, _ = next(demonstrations(path))
    assert prompt == READ[:2]


def test_a_completion_may_be_messages_from_the_assistants_on(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": TALK[:2], "completion": TALK[2:]})
    assert next(demonstrations(path)) == (READ[:2], READ[2:])
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": TALK[:1], "completion": TALK[1:]})
    with pytest.raises(InputError, match="completion has messages of user, assistant, tool"):
        demonstrations(path)


@pytest.mark.parametrize(
    ("kind", "row", "options", "expected"),
    [
        (DEMONSTRATIONS, {"question": "a", "answer": "b"},
         {"prompt_field": "question", "completion_field": "answer"}, ("a", "b")),
        (DEMONSTRATIONS, {"input": {"question": "a"}, "completion": "b"},
         {"prompt_field": "input.question"}, ("a", "b")),
        (PREFERENCES, {"question": "a", "chosen": "b", "rejected": "c"},
         {"prompt_field": "question"}, ("a", "b", "c")),
        (PREFERENCES, {"prompt": "a", "response": "b", "label": True},
         {"completion_field": "response"}, ("a", "b", "")),
        (LABELLED_STEPS, {"problem": "a", "completions": ["b"], "labels": [1]},
         {"prompt_field": "problem"}, ("a", ("b",), (1.0,))),
    ],
)  # fmt: skip
def test_columns_of_other_names_are_read_by_options(tmp_path, kind, row, options, expected):
    path = write_rows(tmp_path / "rows.jsonl", row)
    assert next(load(kind, path, **options)) == expected
    with pytest.raises(InputError, match=f"{kind.fields[0]}.*: there is no field problme"):
        load(kind, path, **{option: f"problme_{option}" for option in options})


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "must be messages, each of a role (system, user, assistant, tool) and a content"),
        ([{"role": "bot", "content": "a"}], "must be messages, each of a role"),
        ([*TALK, {"role": "assistant", "content": None, "tool_calls": [1]}], "must be messages"),
        ("hello", "'hello' must be messages, each of a role"),
        (TALK[:2], "messages of system, user must begin with another role than the assistant's"),
        (TALK[2:], "messages of assistant, tool, assistant must begin with another role"),
        (TALK[:4], "and end with the assistant"),
        ([TALK[1], {"role": "assistant", "content": ""}], "no message of the assistant may be bla"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_refused_with_its_line(
    tmp_path, messages, expected
):
    path = tmp_path / "talks.jsonl"
    write_rows(path, {"messages": TALK}, {"messages": messages})
    with pytest.raises(InputError) as caught:
        demonstrations(path)
    assert f"{path}:2: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (DEMONSTRATIONS, "", "no demonstrations"),
        (DEMONSTRATIONS, "{", "rows.jsonl:1: expected an object"),
        (DEMONSTRATIONS, '{"prompt": "a", "completion": "b"}\n{"prompt": "a"}',
         "rows.jsonl:2: expected an object"),
        (DEMONSTRATIONS, '{"prompt": "a", "completion": ""}', "rows.jsonl:1: completion is blank"),
        (DEMONSTRATIONS, '{"prompt": 3, "completion": "b"}',
         "rows.jsonl:1: prompt is 3, must be a text or messages"),
        (DEMONSTRATIONS, '{"prompt": "a", "completion": "[{\'role\': \'user\', \'conten"}',
         "rows.jsonl:1: completion is the text of a list"),
        (DEMONSTRATIONS, '{"prompt": "a", "completion": "\\ud800"}',
         "rows.jsonl:1: a text has a lone surrogate"),
        (DEMONSTRATIONS, '{"messages": [{"role": "user", "content": "a"}, '
         '{"role": "assistant", "content": "b\\u0000"}]}',
         "rows.jsonl:1: a text has a NUL character at 1"),
        (DEMONSTRATIONS, '{"prompt": ' + "[" * 900 + "]" * 900 + ', "completion": "b"}',
         "must be a text or messages"),
        (PREFERENCES, "", "no preferences"),
        (PREFERENCES, "{", "rows.jsonl:1: expected an object with prompt, chosen and rejected; or"),
        (PREFERENCES, '{"prompt": "a", "chosen": "b"}', "rows.jsonl:1: expected an object"),
        (PREFERENCES, '{"prompt": "a", "rejected": "b"}', "{'prompt': 'a', 'rejected': 'b'}"),
        (PREFERENCES, '{"prompt": "a", "chosen": "b", "rejected": 3}',
         "rejected is 3, must be a text or messages"),
        (PREFERENCES, '{"prompt": "a", "chosen": "b", "rejected": ""}', "rejected is blank"),
        (PREFERENCES, '\n{"prompt": "a", "chosen": "b", "rejected": "b"}',
         "rows.jsonl:2: chosen and rejected"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_its_line(tmp_path, kind, content, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"rows\.jsonl") as caught:
        load(kind, path)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        (DEMONSTRATIONS, "lettered_chain_sum", {"worked_shar": 1},
         "no option worked_shar; .*worked_share"),
        (DEMONSTRATIONS, "pairs.jsonl", {"worked_share": 1},
         "no option worked_share; its options: completion_field, prompt_field"),
        (DEMONSTRATIONS, "pairs.jsonl", {"prompt_field": "completion"},
         "prompt_field and completion_field are both 'completion'"),
        (DEMONSTRATIONS, "reasoning_gym:chain_sum", {},
         "has no demonstrations; give a source with .*, or a file of rows with prompt and compl"),
        (PREFERENCES, "reasoning_gym:chain_sum", {}, "has no preferences"),
        (PREFERENCES, "user_module:Judged", {"gives": "pair"},
         "must be a tuple of prompt, chosen, rejected"),
        (PREFERENCES, "user_module:Judged", {"gives": "numbers"}, "chosen is 1, must be a text"),
        (PREFERENCES, "user_module:Judged", {"gives": "equal"},
         "chosen and rejected are both 'a' for the prompt 'p'"),
        (PREFERENCES, "user_module:Judged", {"gives": "nothing"}, "came to an end"),
        (PREFERENCES, "user_module:Judged", {"gives": "error"}, r"raised KeyError\('lost'\)"),
        (PREFERENCES, "user_module:Judged", {}, "requires the option gives"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_used_is_an_input_error(kind, name, options, message):
    with pytest.raises(InputError, match=message):
        next(load(kind, name, **options))


@pytest.mark.parametrize(
    "labels",
    [[True, False], [1, 0], [0.75, 0.0], [1.0, 0.25]],
    ids=["bool", "int", "soft", "mixed"],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_steps_come_with_the_probability_that_each_is_right(tmp_path, name, labels):
    row = {"prompt": "1+2+3=", "completions": ["1+2=3", "3+3=7"], "labels": labels}
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    else:
        write_rows(tmp_path / name, [row])
    drawn = next(load(LABELLED_STEPS, tmp_path / name))
    assert drawn == ("1+2+3=", ("1+2=3", "3+3=7"), tuple(map(float, labels)))


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": [True]}, {"labels": []}, {"labels": [1.5, 0]}, {"labels": [-1, 0]},
        {"labels": ["+", "-"]}, {"labels": [None, True]}, {"labels": True},
        {"completions": ["a", " "]}, {"completions": "ab"}, {"completions": [1, 2]},
        {"completions": [], "labels": []}, {"labels": [float("nan"), 1]},
    ],
)  # fmt: skip
def test_steps_without_a_label_each_are_refused_by_their_line(tmp_path, changed):
    row = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False], **changed}
    write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(
        InputError, match=r"rows.jsonl:1: completions .* must be a list .* and labels .* as many"
    ):
        load(LABELLED_STEPS, tmp_path / "rows.jsonl")


def test_the_steps_of_the_demo_are_right_up_to_the_one_that_errs():
    for prompt, steps, labels in islice(load(LABELLED_STEPS, "lettered_chain_sum"), 300):
        right = [eval(step[1:].split("=")[0]) == int(step.split("=")[1]) for step in steps]
        assert list(labels) == [float(all(right[: n + 1])) for n in range(len(right))]
        assert steps_are_right(prompt, ",".join(steps)) is all(labels)
