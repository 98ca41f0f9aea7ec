"""The settings that a trained model folder was made with, and the refusal of other ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.sources.fingerprints import of_files
from deploy.config.changes import changes
from deploy.config.run_config import RunConfig
from deploy.storage.atomic_folder import ORIGIN_FILE
from headway.errors import InputError
from learner.config.lora import WEIGHTS_FILE, LoraConfig
from weight_sync.base_model import fingerprint

FILES = "files"
"""Key in `ORIGIN_FILE` of the fingerprints of files that the settings name."""
RENDERING = {
    "environment", "environment_options", "chat_template", "chat_template_options", "stop",
}  # fmt: skip
"""Keys of `[actors]` that decide how a demonstration is rendered."""


def warm_start_origin(config: RunConfig) -> str:
    """Return the settings that a warm start depends on, and the files that they name, as JSON."""
    sections = config.model_dump(
        mode="json", include={"seed": True, "model": True, "sft": True, "actors": RENDERING}
    )
    if sections["sft"] is not None:
        del sections["sft"]["name"]
    sft = config.sft
    named = sft and [sft.demonstrations, sft.options, _weights_of(sft.lora)]
    sections[FILES] = of_files([named or (), _heldout_options(config)])
    return json.dumps(sections, sort_keys=True)


def reward_model_origin(config: RunConfig) -> str:
    """Return the settings that reward models depend on, and the files that they name, as JSON."""
    section = config.model_dump(mode="json", include={"reward_model"})
    if section["reward_model"] is not None:
        del section["reward_model"]["name"]
    origin = section | json.loads(warm_start_origin(config))
    training = config.reward_model
    named = training and [training.pairs, training.options, _weights_of(training.lora)]
    origin[FILES] |= of_files(named or ())
    return json.dumps(origin, sort_keys=True)


def _weights_of(lora: LoraConfig | None) -> str:
    """Return the file of weights of an adapter to begin with, or "" without one."""
    return "" if lora is None or lora.path is None else str(Path(lora.path) / WEIGHTS_FILE)


def _heldout_options(config: RunConfig) -> Mapping[str, Any]:
    """Return the options that decide which problems examples must not have."""
    heldout, prompts = config.heldout, config.prompts
    if heldout is None:
        return {}
    own = heldout.source_options if heldout.source else {}
    return own or heldout.source_options or prompts.source_options


def same_warm_starts(config: RunConfig) -> list[str]:
    """Return the names of runs whose warm start was made with the same settings."""
    origin = warm_start_origin(config)
    made = sorted(config.deploy.runs_dir.glob(f"*-sft/model/{ORIGIN_FILE}"))
    return [f.parents[1].name.removesuffix("-sft") for f in made if f.read_text() == origin]


def refuse_other_files(folder: Path, wanted: str, remedy: str) -> None:
    """Refuse a folder for a new run whose files of examples, or of held-out problems, changed.

    Otherwise its examples might have problems that are held out now. A file that is gone is not
    compared; the arguments are those of `refuse_another_origin`, which has accepted the folder.

    Raises:
        InputError: A file changed; names it.
    """
    made = json.loads((folder / ORIGIN_FILE).read_text()).get(FILES, {})
    for name, present in json.loads(wanted)[FILES].items():
        if made.get(name, present) != present:
            raise InputError(
                f"{folder} was made with another {name} ({made[name]} then, {present} now). For"
                f" this one, {remedy}"
            )


def fingerprint_of_model(path: str) -> str:
    """Return a fingerprint of a model folder; of a name on the hub, the name.

    See `weight_sync.base_model.fingerprint`.
    """
    if not Path(path).is_dir():
        return path
    return fingerprint(file for file in Path(path).iterdir() if file.is_file())


def refuse_another_origin(folder: Path, wanted: str, remedy: str) -> None:
    """Refuse the folder of a warm start or of reward models that was made with other settings.

    `wanted` are the settings as JSON; `remedy` tells in the error how to make a folder that fits.

    Raises:
        InputError: Settings differ, or the folder has none; names those that differ.
    """
    try:
        made = json.loads((folder / ORIGIN_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has no record of what it was made with: {error}; {remedy}"
        ) from None
    differ = [
        f"{change.name} = {change.before}, not {change.after}"
        for change in changes(made | {FILES: None}, json.loads(wanted) | {FILES: None})
    ]
    if differ:
        shown = "; ".join(differ[:3]) + ("; and more" if len(differ) > 3 else "")
        raise InputError(f"{folder} was made with {shown}. For this recipe, {remedy}")
