"""A run whose prompts change between its sessions."""

import json
from collections import Counter

import pytest

from queues.readers.open_run import open_ledger

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]

SETTINGS = [
    "prompts.source=files",
    "heldout.source=files",
    "heldout.size=3",
    "heldout.final_size=4",
]


def write(path, numbers, sign):
    rows = [{"prompt": f"a{n % 10}b{sign}{n // 10}=", "answer": "1"} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {row["prompt"] for row in rows}


def trained(folder):
    """Return the ids and the texts of the prompts that were trained, in the order of issue."""
    with open_ledger(folder) as ledger:
        rows = ledger.execute(
            "SELECT prompt FROM groups WHERE purpose = 'train' AND state = 'trained'"
            " ORDER BY number"
        ).fetchall()
    prompts = [json.loads(text) for (text,) in rows]
    return [p["prompt_id"] for p in prompts], [p["text"] for p in prompts]


def test_a_changed_prompt_file_is_refused_and_a_new_epoch_trains_nothing_held_out(headway):
    train, test = headway.folder / "train.jsonl", headway.folder / "test.jsonl"
    write(train, range(30), "+")
    held_out = write(test, range(4), "+")
    options = [
        f"prompts.source_options={{path='{train}'}}",
        f"heldout.source_options={{path='{test}'}}",
    ]
    run = headway.finish("edited", "steps=2", *SETTINGS, *options)
    for file, numbers in ((train, range(29)), (test, range(1, 5))):
        content = file.read_text()
        write(file, numbers, "+")
        refused = headway("resume", "edited", "--set", "steps=16")
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert 'prompts.on_change="new_epoch"' in refused.stderr
        if file == train:
            assert "train.jsonl: 30 prompts" in refused.stderr
            file.write_text(content)
    write(train, reversed(range(28)), "+")
    new_held_out = {json.loads(line)["prompt"] for line in test.read_text().splitlines()}
    went_on = headway(
        "resume", "edited", "--set", "steps=16", "--set", 'prompts.on_change="new_epoch"'
    )
    assert went_on.returncode == 0, went_on.stdout + went_on.stderr
    assert "the prompts changed, and a new epoch of them begins" in went_on.stderr
    all_ids, texts = trained(run.folder)
    assert len(all_ids) == len(set(all_ids)) == 32
    later = [i for i in all_ids if i.startswith("train~1/0/")]
    assert later
    epoch = [text for i, text in zip(all_ids, texts, strict=True) if i in set(later)]
    assert max(Counter(epoch).values()) == 1
    assert not set(texts) & held_out
    assert not set(epoch) & new_held_out
    with open_ledger(run.folder) as ledger:
        rows = ledger.execute("SELECT DISTINCT prompt FROM groups WHERE purpose = 'evaluate'")
        assert {json.loads(text)["text"] for (text,) in rows} == held_out
