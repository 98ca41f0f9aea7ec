"""Runs of `headway bench chaos` whose rollouts are conversations, and what became of their turns.

Compared are the notes that the ledger held at each kill, the rollouts in the journal, and what the
agent or the tool has noted itself. Notes that are too old are deleted when a group is leased again,
which then starts at a newer version than theirs: what was begun anew for that is counted apart.
"""

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from actors.engines.model_folder import load_tokenizer
from queues.records import Rollout
from queues.schema import decode
from queues.storage.journal import LOCATION, read_group
from queues.turns import decode_turn

PROGRAM = Path(__file__).with_name("chaos_agent.py")
_BOTH = (
    "actors.max_turns=4",
    "queues.on_overdue=wait",
    "deploy.watchdog_seconds=60",
    "deploy.start_timeout_seconds=600",
)
SESSIONS = {
    "agent": (
        *_BOTH,
        f"actors.environment=program:python {PROGRAM}",
        'actors.environment_options={preload=["openai.resources.chat"]}',
    ),
    "tools": (
        *_BOTH,
        "actors.environment=tools",
        'actors.environment_options={tools=["benchmarks.reliability.chaos_agent:number"],'
        'style="plain",markers=["=",","]}',
        "sft.options={worked_share=0.9}",
        "sft.steps=150",
        "sft.learning_rate=3e-3",
    ),
}
"""Settings of the recipe by what talks to the policy."""
CALL = re.compile("=([^,]*),")
IN_FLIGHT_SECONDS = (1.0, 10.0)
"""A call that ended so shortly before a kill, or after it, may have had no time to be noted."""
Key = tuple[str, int, str]
"""Group, sample index and name of a note."""


class Note(NamedTuple):
    """A note as it was seen at a kill."""

    attempt: int
    payload: bytes


class Ended(NamedTuple):
    """A group in the ledger, with its rollouts if it has a result."""

    state: str
    attempt: int
    start_version: int
    rollouts: Mapping[int, Rollout]


def read_notes(run: Path) -> dict[Key, Note]:
    """Return the notes in the ledger of a run; none before it has tables."""
    asked = (
        "SELECT group_id, sample_index, name, attempt, payload FROM notes"
        " JOIN groups USING (group_id)"
    )
    with suppress(sqlite3.OperationalError), closing(_open(run)) as ledger:
        rows = ledger.execute(asked).fetchall()
        return {(group, index, name): Note(*rest) for group, index, name, *rest in rows}
    return {}


def read_ended(run: Path) -> dict[str, Ended]:
    """Return the groups of training by their ids."""
    with closing(_open(run)) as ledger:
        rows = ledger.execute(
            f"SELECT group_id, state, groups.attempt, start_version, {LOCATION} FROM groups"
            " LEFT JOIN results USING (group_id) WHERE purpose = 'train'"
        ).fetchall()
    ended = {}
    for group_id, state, attempt, start, *location in rows:
        found = decode(read_group(run / "journal", location)).rollouts if location[-1] else ()
        ended[group_id] = Ended(state, attempt, start, {r.sample_index: r for r in found})
    return ended


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the log of an agent or a tool."""
    lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def judge_sessions(
    seen: Sequence[tuple[Key, Note]],
    ended: Mapping[str, Ended],
    log: Sequence[Mapping[str, Any]],
    kills: Sequence[float],
    characters: Sequence[str],
) -> dict[str, int]:
    """Count what became of noted turns, of answers and of calls; see `WRONG`.

    `seen` are the notes at all kills, and `characters` are those of the model's tokens.
    """
    counts = Counter(f"groups_{group.state}" for group in ended.values())
    turns = {
        (key, note): decode_turn(note.payload) for key, note in seen if key[2].startswith("turn/")
    }
    too_old = {
        key[0]
        for (key, _), turn in turns.items()
        if ended[key[0]].start_version > min(turn.versions, default=1 << 31)
    }
    said = {  # by rollout and text: what the policy said in a turn
        (*key[:2], _text(turn.token_ids, characters)) for (key, _), turn in turns.items()
    }
    for group_id, group in ended.items():
        for index, rollout in group.rollouts.items():
            said |= {(group_id, index, text) for text in _messages(rollout, characters)}
    for (key, note), turn in turns.items():
        group = ended[key[0]]
        if key[1] in group.rollouts and not _holds(group.rollouts[key[1]], turn):
            counts["turns_too_old" if key[0] in too_old else "turns_made_again"] += 1
        elif key[1] in group.rollouts and group.attempt > note.attempt:
            counts["turns_gone_on_from"] += 1
    counts += _judge_answers([row for row in log if "turn" in row], too_old)
    counts += _judge_calls([row for row in log if "call" in row], said, kills)
    return dict(sorted(counts.items()))


WRONG = ("turns_made_again", "calls_made_again", "answers_differ")
"""Counts that must be 0: noted turns that are not in their rollouts although they were not too old,
calls that were made oftener than the policy wrote them, and turns of which two plays of an agent
had different answers."""


def _judge_answers(rows: Sequence[Mapping[str, Any]], too_old: set[str]) -> Counter[str]:
    """Compare what agents were answered in a turn, where they were played more than once."""
    answers: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in rows:
        answers[row["rollout"], row["turn"]].append(row["answer"])
    counts = Counter(answers=len(rows))
    for (rollout_id, _), got in answers.items():
        if len({*got}) > 1:
            old = rollout_id.rpartition("/")[0] in too_old
            counts["answers_too_old" if old else "answers_differ"] += 1
        elif len(got) > 1:
            counts["answers_repeated"] += 1
    return counts


def _judge_calls(
    rows: Sequence[Mapping[str, Any]], said: Iterable[tuple[str, int, str]], kills: Sequence[float]
) -> Counter[str]:
    """Compare how often each call was made with how often the policy wrote it."""
    written = Counter(call for *_, text in said for call in CALL.findall(text))
    made: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        made[row["expression"]].append(row["at"])
    counts, (before, after) = Counter(calls=len(rows)), IN_FLIGHT_SECONDS
    for expression, times in made.items():
        late = sum(any(at - before < time < at + after for at in kills) for time in times)
        more = max(0, len(times) - written[expression])
        counts["calls_in_flight"] += min(more, late)
        counts["calls_made_again"] += max(0, more - late)
    return counts


def _messages(rollout: Rollout, characters: Sequence[str]) -> list[str]:
    """Return what the policy said in each turn of a rollout."""
    tokens = zip(rollout.loss_mask, rollout.token_ids, strict=True)
    runs = groupby(tokens, key=itemgetter(0))
    return [_text([i for _, i in run], characters) for sampled, run in runs if sampled]


def _text(ids: Iterable[int], characters: Sequence[str]) -> str:
    """Return the text of tokens without control tokens, which a tool is not given."""
    return "".join(characters[i] for i in ids if len(characters[i]) == 1)


def _holds(rollout: Rollout, turn: Any) -> bool:
    """Return True if a rollout has a turn's very tokens, with their versions and log-probs."""
    own = [*zip(turn.token_ids, turn.versions, turn.behavior_logprobs, strict=True)]
    row = [*zip(rollout.token_ids, rollout.versions, rollout.behavior_logprobs, strict=True)]
    return any(row[start : start + len(own)] == own for start in range(len(row)))


def characters_of(folder: Path) -> list[str]:
    """Return the texts of the tokens of the model in a folder of runs."""
    tokenizer = load_tokenizer(str(next(folder.rglob("tokenizer.json")).parent))
    return [str(text) for text in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]


def _open(run: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
