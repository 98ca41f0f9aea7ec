"""`headway rollouts --open`: one recorded rollout as a page that needs nothing but itself."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from actors.environments.tools import ToolOptions
from actors.rollout.chat_rendering import renderer_for
from deploy.config.run_config import RunConfig
from deploy.offline.rollout_scores import describe_advantage, learner_logprobs
from deploy.offline.rollouts import policy_tokenizer
from deploy.report.conversation import show_segments
from deploy.report.report import lay_out
from deploy.storage.run_directory import RunDirectory
from headway.atomic_file import atomic_file
from headway.clean_text import without_secrets
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.user_code import look_in
from queues.readers.recorded_groups import RecordedGroup, read_recorded_group, recorded_groups
from queues.records import Rollout

TEMPLATE, FOLDER = "rollout.html", "rollouts"
"""The file that lays a page out, beside that of the report, and the folder of a run for pages."""
NAMED = 5
"""Most ids in a message."""
HUE = 137.5
"""Degrees between the colours of two versions: those of versions in a row are far apart."""


def find_rollout(directory: RunDirectory, wanted: str) -> tuple[RecordedGroup, Rollout]:
    """Return the rollout with an id, as "g00000003/1", or the only one whose id begins so.

    Raises InputError, which names the nearest ids, for none or several.
    """
    known = recorded_groups(directory.path)
    group_id = wanted.partition("/")[0]
    ids = [group_id] if group_id in known else [name for name in known if name.startswith(wanted)]
    if len(ids) == 1:
        recorded = read_recorded_group(directory.path, ids[0])
        rollouts = {f"{ids[0]}/{r.sample_index}": r for r in recorded.group.rollouts}
        known = [*rollouts]
        ids = [wanted] if wanted in rollouts else [i for i in known if i.startswith(wanted)]
        if len(ids) == 1:
            return recorded, rollouts[ids[0]]
    if ids:
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        raise InputError(
            f"--open {wanted!r} begins more than one id: {', '.join(ids[:NAMED])}{more}; write one"
        )
    raise InputError(
        f"--open {wanted!r}: no rollout in the journal of {directory.path} has such an id"
        f"{nearest(wanted, known)}; `headway rollouts` prints them, as g00000003/1"
    )


def draw_rollout(directory: RunDirectory, wanted: str) -> Path:
    """Write the page of a rollout into the run's folder; return its path.

    Raises InputError as `find_rollout`, and if no tokenizer of the run's policy is left.
    """
    recorded, rollout = find_rollout(directory, wanted)
    config, name = directory.config(), f"{recorded.group.group_id}/{rollout.sample_index}"
    look_in(config.deploy.code_dir)
    renderer = renderer_for(policy_tokenizer(directory), config.actors)
    learned, problems = learner_logprobs(directory, config, rollout)
    markers = config.actors.environment_options.get("markers", ToolOptions().markers)
    tokens = _tokens(rollout, learned)
    versions = sorted({token["version"] for token in tokens.values()})
    gaps = [abs(token["gap"]) for token in tokens.values() if token["gap"] is not None]
    facts = _facts(config, recorded, rollout)
    if gaps:
        facts["log-prob gap, engine less learner"] = (
            f"{fmean(gaps):.2g} nats on average, at most {max(gaps):.2g}, of {len(gaps)} tokens"
        )
    html = lay_out(
        TEMPLATE,
        title=f"{directory.path.name}: rollout {name}",
        facts={label: without_secrets(text) for label, text in facts.items()},
        problems=[*map(without_secrets, problems)],
        colours={version: version * HUE % 360 for version in versions},
        tokens=tokens,
        segments=show_segments(rollout, renderer, (markers[0], markers[1])),
    )
    file = directory.path / FOLDER / f"{name.replace('/', '-')}.html"
    file.parent.mkdir(exist_ok=True)
    with atomic_file(file) as opened:
        opened.write(html.encode())
    return file


def _tokens(rollout: Rollout, learned: Mapping[int, float]) -> dict[int, dict[str, Any]]:
    """Return the figures of each sampled token by its index."""
    return {
        i: {
            "id": rollout.token_ids[i],
            "version": rollout.versions[i],
            "logprob": (logprob := rollout.behavior_logprobs[i]),
            "learner": learned.get(i),
            "gap": logprob - learned[i] if i in learned else None,
        }
        for i, is_sampled in enumerate(rollout.loss_mask)
        if is_sampled
    }


def _facts(config: RunConfig, recorded: RecordedGroup, rollout: Rollout) -> dict[str, str]:
    """Return what the page says of a rollout as a whole, by label."""
    group, trained = recorded.group, recorded.trained_version
    sampled = [v for v, chosen in zip(rollout.versions, rollout.loss_mask, strict=True) if chosen]
    oldest, newest = min(sampled, default=None), max(sampled, default=None)
    rewards = ", ".join(f"{other.reward:g}" for other in group.rollouts)
    state = recorded.state + (f": {recorded.reason}" if recorded.reason else "")
    lag = "not trained" if trained is None or oldest is None else str(trained - oldest)
    facts = {
        "prompt": group.prompt_id,
        "state": state if trained is None else f"{state} at version {trained}",
        "reward": f"{rollout.reward:g} (in its group: {rewards})",
        **{f"reward, {part}": f"{value:g}" for part, value in rollout.reward_parts.items()},
        "advantage": describe_advantage(config.objective, group, group.rollouts.index(rollout)),
        "ended by": str(rollout.finish_reason),
        "turns": str(rollout.turns),
        "tokens": f"{len(sampled)} sampled, {len(rollout.token_ids) - len(sampled)} given",
        "versions": f"{oldest}" if oldest == newest else f"{oldest} to {newest}",
        "lag": lag,
        "seconds": f"{(rollout.finished_at - rollout.created_at).total_seconds():.1f}",
        "played by": f"{rollout.engine_id}, {rollout.environment}, attempt {group.attempt}",
    }
    left_out = {f"left out, {reason}": f"{n} tokens" for reason, n in rollout.left_out.items()}
    return facts | left_out
