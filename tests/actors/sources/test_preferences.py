"""Preference sets: every form of Hugging Face's data sets, and rows that are none."""

import json
from itertools import islice

import pytest

from actors.environments.protocol import Message
from actors.sources.examples import load_examples
from actors.sources.preferences import PREFERENCES, judged_completions


def user(content):
    return {"role": "user", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


def messages(*turns):
    return tuple(Message(**turn) for turn in turns)


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED, YES, NO = user("Is it?"), said("Yes."), said("No.")
HH = "\n\nHuman: Is it?\n\nAssistant: What?\n\nHuman: Is it?\n\nAssistant:"
HH_PROMPT = messages(ASKED, said("What?"), ASKED)

PAIRS = {
    "texts": ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, ("1+1=", "2", "3")),
    "messages": (
        {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
        (messages(ASKED), messages(YES), messages(NO)),
    ),
    "a text of a prompt and messages": (
        {"prompt": "Is it?", "chosen": [YES], "rejected": [NO]},
        ("Is it?", messages(YES), messages(NO)),
    ),
    "whole conversations": (
        {"chosen": [ASKED, YES], "rejected": [ASKED, NO], "score_chosen": 8.5, "prompt": None},
        (messages(ASKED), messages(YES), messages(NO)),
    ),
    "whole conversations beside their prompt (ultrafeedback_binarized)": (
        {
            "prompt": "Is it?",
            "chosen": [ASKED, YES],
            "rejected": [ASKED, NO],
            "messages": [ASKED],
        },
        (messages(ASKED), messages(YES), messages(NO)),
    ),
    "conversations that part later": (
        {"chosen": [ASKED, YES, ASKED, NO], "rejected": [ASKED, YES, ASKED, YES]},
        (messages(ASKED, YES, ASKED), messages(NO), messages(YES)),
    ),
    "conversations that part early": (
        {"chosen": [ASKED, YES, ASKED, NO], "rejected": [ASKED, NO]},
        (messages(ASKED), messages(YES, ASKED, NO), messages(NO)),
    ),
    "texts with a common beginning": (
        {"chosen": "The sky is blue", "rejected": "The sky is black"},
        ("The sky is", " blue", " black"),
    ),
    "a word that begins another": (
        {"chosen": "The cat sat", "rejected": "The cats sat"},
        ("The", " cat sat", " cats sat"),
    ),
    "a text that begins the other": (
        {"chosen": "It is so", "rejected": "It is"},
        ("It", " is so", " is"),
    ),
    "turns in a text (hh-rlhf)": (
        {"chosen": f"{HH} Yes.", "rejected": f"{HH} No."},
        (HH_PROMPT, messages(YES), messages(NO)),
    ),
    "a system message in a column of its own (orca_dpo_pairs)": (
        {"system": SYSTEM["content"], "prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
        (messages(SYSTEM, ASKED), "Yes.", "No."),
    ),
    "a system message beside a prompt of messages": (
        {"system": SYSTEM["content"], "prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
        (messages(SYSTEM, ASKED), messages(YES), messages(NO)),
    ),
    "a system message beside whole conversations": (
        {"system": SYSTEM["content"], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        (messages(SYSTEM, ASKED), messages(YES), messages(NO)),
    ),
    "a system message that the prompt has too": (
        {"system": "x", "prompt": [SYSTEM, ASKED], "chosen": [YES], "rejected": [NO]},
        (messages(SYSTEM, ASKED), messages(YES), messages(NO)),
    ),
    "an empty system message": (
        {"system": "", "prompt": "Is it?", "chosen": "Yes.", "rejected": "No."},
        ("Is it?", "Yes.", "No."),
    ),
    "turns in the text of a prompt": (
        {"prompt": HH, "chosen": "Yes.", "rejected": "No."},
        (HH_PROMPT, "Yes.", "No."),
    ),
    "a desirable text": ({"prompt": "1+1=", "completion": "2", "label": True}, ("1+1=", "2", "")),
    "an undesirable one": (
        {"prompt": "1+1=", "completion": "3", "label": False},
        ("1+1=", "", "3"),
    ),
    **{
        f"the label {label!r}": (
            {"prompt": "1+1=", "completion": "3", "label": label},
            ("1+1=", "3", "") if good else ("1+1=", "", "3"),
        )
        for good, labels in {
            True: (1.0, "1.0", "True ", "yes"),
            False: (0.0, " false", "No"),
        }.items()
        for label in labels
    },
    "judged messages (kto-mix)": (
        {"prompt": [ASKED], "completion": [YES], "label": 1},
        (messages(ASKED), messages(YES), ""),
    ),
}


@pytest.mark.parametrize(("row", "expected"), PAIRS.values(), ids=PAIRS)
def test_every_form_is_read(row, expected):
    assert PREFERENCES.read_row(row) == expected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "chosen": "y"}, "expected an object with prompt, chosen and rejected; or"),
        ({"prompt": "x", "answer": "y"}, "expected an object with prompt, chosen and rejected; or"),
        (["x", "y", "z"], "expected an object with"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are both 'y'"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED, YES]}, "chosen and rejected are both"),
        ({"prompt": "x", "chosen": "y", "rejected": ""}, "rejected is blank"),
        ({"chosen": "Yes", "rejected": "No"}, "there is no prompt, and chosen and rejected begin"),
        (
            {"question": "1+1=", "chosen": "It is 2", "rejected": "It is 3"},
            'there is no field prompt; set the option prompt_field = "question", if it is',
        ),
        ({"chosen": [YES], "rejected": [NO]}, "there is no prompt"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED]}, "rejected is blank, or has nothing after"),
        ({"chosen": [ASKED, YES], "rejected": "x"}, "must both be texts, or both messages"),
        (
            {"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
            "chosen has messages of user, assistant after the prompt",
        ),
        (
            {"chosen": [ASKED, YES, ASKED], "rejected": [ASKED, NO]},
            "must begin and end with the assistant",
        ),
        (
            {"chosen": [ASKED, YES, ASKED, YES], "rejected": [ASKED, YES, user("No?"), YES]},
            "chosen has messages of user, assistant after the prompt",
        ),
        ({"chosen": [ASKED, said("")], "rejected": [ASKED, NO]}, "may be blank"),
        ({"chosen": [ASKED, said(" ")], "rejected": [ASKED, NO]}, "may be blank"),
        ({"prompt": "x", "chosen": "y", "rejected": " \n"}, "rejected is blank"),
        ({"prompt": "x", "chosen": [{"text": "y"}], "rejected": [NO]}, "chosen is .*, must be"),
        (
            {"prompt": "x", "chosen": str([YES]), "rejected": str([NO])},
            "chosen is the text of a list",
        ),
        ({"prompt": "x", "chosen": 3, "rejected": "y"}, "chosen is 3, must be a text or messages"),
        ({"prompt": "x", "completion": "y", "label": 0.3}, "label is 0.3, must be true or false"),
        (
            {"completion": "y", "label": True},
            "there is no field prompt, must be a text or messages",
        ),
        ({"prompt": "x", "chosen": "y\0", "rejected": "z"}, "a NUL character at 1"),
        ({"prompt": "x", "completion": "", "label": 0}, "^completion is blank"),
        ({"prompt": "x", "completion": [said("")], "label": 1}, "^completion: no message of"),
        ({"prompt": "x", "completion": [ASKED, YES], "label": 1}, "^completion has messages of"),
    ],
)
def test_a_row_that_is_none_says_why(row, problem):
    with pytest.raises(ValueError, match=problem):
        PREFERENCES.read_row(row)


def test_pairs_are_two_judged_completions_and_no_prompt_is_held_out(tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [row for name, (row, _) in PAIRS.items() if name in ("texts", "whole conversations")]
    file.write_text("\n".join(map(json.dumps, rows)))
    pairs = load_examples(PREFERENCES, str(file), options={}, seed=0, heldout=frozenset(["Is it?"]))
    judged = list(islice(judged_completions(pairs), 3))
    assert judged == [("1+1=", "2", ""), ("1+1=", "", "3"), ("1+1=", "2", "")]
