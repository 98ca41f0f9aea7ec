"""Preference pairs for reward models: from the demo's source, from files, from a user's source."""

from itertools import islice

import pytest

from actors.environments.protocol import Message
from actors.sources.examples import PREFERENCES, load_examples
from actors.sources.lettered_chain_sum import CHARACTERS, LetteredChainSum
from headway.errors import InputError


def load(name, seed=0, heldout=frozenset(), **options):
    return load_examples(PREFERENCES, name, options=options, seed=seed, heldout=heldout)


def value(prompt):
    """Evaluate a prompt such as `a3b+5c-7=`, without its letters."""
    return eval("".join(c for c in prompt[:-1] if not c.isalpha()))


def steps_are_right(prompt, completion):
    """Whether a worked answer has a right step for each term, one after the other."""
    terms = [prompt[1], *(prompt[i : i + 2] for i in range(3, len(prompt) - 1, 3))]
    letters = [c for c in prompt if c.isalpha()]
    expected, total = [], int(terms[0])
    for letter, term in zip(letters[1:], terms[1:], strict=True):
        expected.append(f"{letter}{total}{int(term):+d}={total + int(term)}")
        total += int(term)
    return completion == ",".join(expected)


def test_the_better_answer_is_worked_and_right_and_the_worse_one_is_not():
    for prompt, chosen, rejected in islice(load("lettered_chain_sum"), 2000):
        assert set(prompt + chosen + rejected) <= set(CHARACTERS)
        assert steps_are_right(prompt, chosen)
        assert int(chosen.rsplit("=", 1)[1]) == value(prompt)
        assert not steps_are_right(prompt, rejected)


def test_worse_answers_are_guesses_or_worked_with_a_step_that_is_wrong_or_missing():
    pairs = list(islice(load("lettered_chain_sum", guess_share=0.25), 2000))
    guesses = [(p, r) for p, _, r in pairs if r.startswith("=")]
    assert 0.21 < len(guesses) / len(pairs) < 0.29
    right = sum(int(guess[1:]) == value(prompt) for prompt, guess in guesses)
    assert 0.08 < right / len(guesses) < 0.21
    worked = [(chosen, r) for _, chosen, r in pairs if not r.startswith("=")]
    missing = sum(r.count(",") == chosen.count(",") - 1 for chosen, r in worked)
    wrong = sum(r.count(",") == chosen.count(",") for chosen, r in worked)
    assert missing + wrong == len(worked)
    assert 0.4 < missing / len(worked) < 0.6


def test_pairs_demonstrations_and_training_prompts_are_of_different_problems():
    heldout = frozenset(
        p.text for p in LetteredChainSum(seed=0, split="heldout", heldout_size=300).next(300)
    )
    pairs = {p for p, _, _ in islice(load("lettered_chain_sum", heldout=heldout), 3000)}
    source = LetteredChainSum(seed=0, heldout_size=300)
    training = {p.text for p in source.next(3000) if len(p.text) > 20}
    shown = {p for p, _ in islice(source.demonstrations(), 3000) if len(p) > 20}
    assert not pairs & heldout
    assert not pairs & (training | shown)


def test_a_seed_has_its_own_pairs_and_always_the_same():
    first = list(islice(load("lettered_chain_sum", seed=3), 50))
    assert first == list(islice(load("lettered_chain_sum", seed=3), 50))
    assert not {p for p, _, _ in first} & {
        p for p, _, _ in islice(load("lettered_chain_sum", seed=4), 50) if len(p) > 20
    }


def test_a_file_is_shuffled_anew_every_epoch_and_shows_no_held_out_prompt(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{i}", "chosen": "a\u2028", "rejected": ""}}\n' for i in range(3))
    )
    with pytest.raises(InputError, match="only the prompt may be empty"):
        load(str(path))
    path.write_text(
        "".join(f'{{"prompt": "{i}", "chosen": "a\u2028", "rejected": "b"}}\n' for i in range(30))
    )
    pairs = list(islice(load(str(path), heldout=frozenset(["0", "1"])), 56))
    assert pairs[0] == (pairs[0][0], "a\u2028", "b")
    assert sorted(pairs[:28]) == sorted(pairs[28:])
    assert pairs[:28] != pairs[28:]
    assert {prompt for prompt, _, _ in pairs} == {str(i) for i in range(2, 30)}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no preferences"),
        ("{", "pairs.jsonl:1: expected an object with the strings prompt, chosen, rejected"),
        ('{"prompt": "a", "chosen": "b"}', "pairs.jsonl:1: expected an object"),
        ('{"prompt": "a", "rejected": "b"}', "KeyError('chosen')"),
        ('{"prompt": "a", "chosen": "b", "rejected": 3}', "must be a tuple of the strings"),
        ('\n{"prompt": "a", "chosen": "b", "rejected": "b"}', "pairs.jsonl:2: chosen and rejected"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, content, expected):
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lettered_chain_sum", {"worse": 1}, "no option worse; its options: .*guess_share"),
        ("reasoning_gym:chain_sum", {}, "has no preference pairs"),
        ("user_module:Judged", {"gives": "pair"}, "must be a tuple of the strings"),
        ("user_module:Judged", {"gives": "numbers"}, "must be a tuple of the strings"),
        (
            "user_module:Judged",
            {"gives": "equal"},
            "chosen and rejected are both 'a' for the prompt 'p'",
        ),
        ("user_module:Judged", {"gives": "nothing"}, "came to an end"),
        ("user_module:Judged", {"gives": "error"}, r"raised KeyError\('lost'\)"),
        ("user_module:Judged", {}, "requires the option gives"),
    ],
)
def test_a_source_that_cannot_be_used_is_an_input_error(name, options, message):
    with pytest.raises(InputError, match=message):
        next(load(name, **options))


def test_the_prompt_of_a_preference_may_be_messages(tmp_path):
    path = tmp_path / "pairs.jsonl"
    prompt = '[{"role": "user", "content": "u"}]'
    path.write_text(f'{{"prompt": {prompt}, "chosen": "a", "rejected": "b"}}')
    assert next(load(str(path))) == ((Message("user", "u"),), "a", "b")
