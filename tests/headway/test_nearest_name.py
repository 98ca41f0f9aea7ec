"""The known name that a misspelt one stands for."""

import pytest

from headway.nearest_name import nearest


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("gpro", ["gspo", "grpo", "dr_grpo"], "grpo"),
        ("asnyc", ["async", "queue"], "async"),
        ("colour", ["color", "collar"], "color"),
        ("GRPO", ["gspo", "grpo"], "grpo"),
        ("lastletter", ["score", "LastLetter"], "LastLetter"),
        ("exat", ["code", "exact_match", "last_answer"], "exact_match"),
        ("math", ["exact_match", "math_verify"], "math_verify"),
        ("foo", ["bar", "demo"], None),
    ],
)
def test_a_similar_name_is_suggested_and_swapped_letters_come_first(name, known, meant):
    assert nearest(name, known) == (f"; did you mean {meant!r}?" if meant else "")
