"""A source whose prompts changed since its cursor was taken is refused, or begins a new epoch."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_files import write_rows

from actors.errors import SourceChanged
from actors.sources import tiny_task
from actors.sources.filters import without_heldout
from actors.sources.fingerprints import go_on, of_prompts, watched
from actors.sources.load_source import load_source
from actors.sources.protocol import RestartableSource
from headway.errors import InputError
from queues.records import Prompt

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "metadata": {"n": n}} for n in range(12)]


class Counting:
    """A source of a user, which numbers its prompts from an offset that its author changes."""

    offset = 0

    def __init__(self):
        self.drawn = 0

    def next(self, count):
        self.drawn += count
        numbers = range(self.drawn - count, self.drawn)
        return [Prompt(prompt_id=f"own/0/{n}", text=f"{n + self.offset}") for n in numbers]

    def cursor(self):
        return str(self.drawn)

    def restore(self, cursor):
        self.drawn = int(cursor)


class Described(Counting):
    """A source that describes what it draws from."""

    content = "first"

    def fingerprint(self):
        return self.content


def opened(options, source="files", heldout_size=3):
    loaded = load_source(source, options=options, seed=0, split="train", heldout_size=heldout_size)
    return without_heldout(watched(loaded, options), frozenset())


@pytest.fixture
def files(tmp_path):
    options = {"path": str(tmp_path / "p.jsonl"), "heldout_path": str(tmp_path / "h.jsonl")}
    write_rows(tmp_path / "p.jsonl", *ROWS)
    write_rows(tmp_path / "h.jsonl", *({"prompt": f"{n}+9="} for n in range(4)))
    return options


EDITS = {
    "a row more": lambda rows: [*rows, {"prompt": "99+1="}],
    "a row less": lambda rows: rows[:-1],
    "another order": lambda rows: rows[::-1],
    "another text": lambda rows: [*rows[:5], {**rows[5], "prompt": "5+2="}, *rows[6:]],
    "another answer": lambda rows: [*rows[:5], {**rows[5], "answer": "7"}, *rows[6:]],
    "other metadata": lambda rows: [*rows[:5], {**rows[5], "metadata": {}}, *rows[6:]],
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", ["p.jsonl", "h.jsonl"])
@pytest.mark.parametrize("mixed", [False, True])
def test_any_other_row_of_a_table_is_noticed(files, tmp_path, edit, name, mixed):
    source, options = "files", files
    if mixed:
        parts = [{"source": "tiny:twice"}, {"source": "files", "options": files}]
        source, options = "mixture", {"parts": parts}
    rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    rows = [{"answer": "", "metadata": {"n": 0}} | row for row in rows]
    write_rows(tmp_path / name, *rows)  # of every field, so that an edit changes one
    before = opened(options, source)
    before.next(5)
    write_rows(tmp_path / name, *EDITS[edit]([*rows, *rows[:2]]))
    with pytest.raises(
        SourceChanged, match=rf"{name}: \d+ prompts, .* before, \d+ prompts, .* now"
    ):
        opened(options, source).restore(before.cursor())


def test_the_same_rows_in_another_notation_are_no_change(files, tmp_path):
    before = opened(files)
    before.next(5)
    text = "".join(json.dumps(row, indent=None, sort_keys=True) + "  \r\n" for row in ROWS)
    (tmp_path / "p.jsonl").write_text("\ufeff" + text, newline="")
    after = opened(files)
    after.restore(before.cursor())
    assert after.next(9) == before.next(9)


@settings(max_examples=25)
@given(
    drawn=st.integers(0, 30), kept=st.sets(st.integers(0, 11), min_size=5), more=st.integers(1, 4)
)
def test_a_new_epoch_has_every_present_row_once_under_ids_of_its_own(
    tmp_path_factory, drawn, kept, more
):
    path = tmp_path_factory.mktemp("rows") / "p.jsonl"
    options = {"path": str(path)}
    write_rows(path, *ROWS)
    before = opened(options, heldout_size=0)
    ids = {prompt.prompt_id for prompt in before.next(drawn)} if drawn else set()
    rows = [*(ROWS[n] for n in sorted(kept)), *({"prompt": f"{n}-1="} for n in range(more))]
    write_rows(path, *rows)
    after = opened(options, heldout_size=0)
    go_on(after, before.cursor(), on_change="new_epoch")
    epoch = after.next(len(rows))
    assert Counter(prompt.text for prompt in epoch) == Counter(row["prompt"] for row in rows)
    assert not ids & {prompt.prompt_id for prompt in epoch}
    assert all(prompt.prompt_id.startswith("p~1/0/") for prompt in epoch)
    resumed = opened(options, heldout_size=0)
    resumed.restore(after.cursor())
    assert resumed.next(7) == after.next(7)


def test_a_restart_may_be_repeated_and_a_second_change_is_another(files, tmp_path):
    before = opened(files)
    before.next(5)
    cursors = [before.cursor()]
    for change in (ROWS[1:], ROWS[2:]):
        write_rows(tmp_path / "p.jsonl", *change)
        source = opened(files)
        go_on(source, cursors[-1], on_change="new_epoch")
        first = source.next(4)
        go_on(source, cursors[-1], on_change="new_epoch")
        assert source.next(4) == first
        cursors.append(source.cursor())
    assert [prompt.prompt_id.split("/")[0] for prompt in first] == ["p~2"] * 4


def test_of_a_mixture_only_the_part_that_changed_begins_anew(files, tmp_path):
    parts = [{"source": "tiny:twice"}, {"source": "files", "options": files}]
    before = opened({"parts": parts}, "mixture")
    before.next(20)
    write_rows(tmp_path / "p.jsonl", *ROWS[1:])
    after = opened({"parts": parts}, "mixture")
    go_on(after, before.cursor(), on_change="new_epoch")
    labels = {p.prompt_id.rsplit("/", 2)[0]: p.prompt_id for p in reversed(after.next(40))}
    assert set(labels) == {"0:tiny_twice", "1:p~1"}
    assert int(labels["0:tiny_twice"].rsplit("/", 1)[1]) > 3


@pytest.mark.parametrize("split", [0, "heldout"])
def test_a_procedural_task_of_another_version_is_noticed(monkeypatch, split):
    before = opened({}, "tiny:twice")
    before.next(5)
    cursor = before.cursor()
    true = tiny_task.problem_at

    def other(task, seed, position):
        problem = true(task, seed, position)
        return problem._replace(answer="other") if seed == split and position == 2 else problem

    monkeypatch.setattr(tiny_task, "problem_at", other)
    after = opened({}, "tiny:twice")
    with pytest.raises(SourceChanged, match="tiny_twice"):
        after.restore(cursor)
    go_on(after, cursor, on_change="new_epoch")
    assert after.next(1)[0].prompt_id == before.next(1)[0].prompt_id


def test_a_source_of_the_user_that_gives_other_prompts_is_noticed(monkeypatch):
    before = watched(Counting())
    before.next(5)
    watched(Counting()).restore(before.cursor())
    monkeypatch.setattr(Counting, "offset", 3)
    with pytest.raises(SourceChanged, match=r"its last prompts: 5 prompts, .* before"):
        watched(Counting()).restore(before.cursor())
    after = watched(Counting())
    go_on(after, before.cursor(), on_change="new_epoch")
    assert [prompt.text for prompt in after.next(2)] == ["8", "9"]


def test_a_file_that_the_options_of_a_users_source_name_is_known_again(tmp_path):
    (tmp_path / "mine.txt").write_text("a\nb\n")
    options = {"nested": [{"file": str(tmp_path / "mine.txt")}], "other": "~", "number": 3}
    before = watched(Counting(), options)
    cursor = before.cursor()
    (tmp_path / "mine.txt").write_text("a\nc\n")
    assert before.cursor() == cursor  # of what it may have read already
    with pytest.raises(SourceChanged, match=r"mine.txt: 4 bytes, .* before, 4 bytes, .* now"):
        watched(Counting(), options).restore(cursor)
    (tmp_path / "mine.txt").unlink()
    with pytest.raises(SourceChanged, match=r"mine.txt: 4 bytes, .* before, not there now"):
        watched(Counting(), options).restore(cursor)


def test_a_source_of_the_user_may_describe_itself(tmp_path, monkeypatch):
    (tmp_path / "log.txt").write_text("")
    options = {"log": str(tmp_path / "log.txt")}
    cursor = watched(Described(), options).cursor()
    (tmp_path / "log.txt").write_text("its own output")
    watched(Described(), options).restore(cursor)
    monkeypatch.setattr(Described, "content", "second")
    with pytest.raises(SourceChanged, match=r"its fingerprint\(\): first before, second now"):
        watched(Described(), options).restore(cursor)


def test_the_refusal_names_what_changed_and_the_setting_that_goes_on(files, tmp_path):
    before = opened(files)
    write_rows(tmp_path / "p.jsonl", *ROWS[1:])
    with pytest.raises(
        InputError, match=r"p.jsonl: .*new epoch.* prompts.on_change=\"new_epoch\""
    ) as caught:
        go_on(opened(files), before.cursor(), on_change="refuse")
    assert caught.value.exit_code == 2


def test_every_shipped_source_is_watched_and_wrapped_once(files):
    for name, options in (("files", files), ("tiny:twice", {}), ("lettered_chain_sum", {})):
        source = load_source(name, options=options, seed=0, split="train", heldout_size=3)
        assert isinstance(source, RestartableSource)
        assert watched(source) is source
    own = watched(Counting())
    assert watched(own) is own


def test_prompts_of_another_order_or_any_other_field_have_another_fingerprint():
    prompt = Prompt(prompt_id="a", text="b", answer="c", metadata={"d": 1})
    others = [
        Prompt(prompt_id="x", text="b", answer="c", metadata={"d": 1}),
        Prompt(prompt_id="a", text="\ud800", answer="c", metadata={"d": 1}),
        Prompt(prompt_id="a", text="b", answer=None, metadata={"d": 1}),
        Prompt(prompt_id="a", text="b", answer="c", metadata={"d": "1"}),
    ]
    prints = {of_prompts([*lists]) for lists in ([prompt], [], *([other] for other in others))}
    assert len(prints) == 2 + len(others)
    assert of_prompts([prompt, others[0]]) != of_prompts([others[0], prompt])
