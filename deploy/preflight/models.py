"""Finds the model folders that a recipe names, or that earlier commands made with its settings.

Every function raises InputError for what is missing, has other content or cannot be used.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engines.model_folder import (
    attention_heads,
    check_model,
    context_length,
    describe,
    load_tokenizer,
    parallel_sizes,
    vocabulary_size,
    weight_shapes,
)
from actors.sources.fingerprints import of_files
from deploy.config.changes import changes
from deploy.config.run_config import RunConfig
from deploy.storage.atomic_folder import ORIGIN_FILE
from headway.errors import InputError
from learner.config.lora import WEIGHTS_FILE, LoraConfig, adapted_layers, check_form, stored_form
from weight_sync.base_model import fingerprint

REWARD_MODELS_ANEW = (
    "run `headway reward-model --replace` with the same recipe and settings, or name the model "
    "folders in actors.reward_model.paths"
)
TRANSPOSED = ("gpt2", "openai-gpt")
"""Types of models whose layers are transformers' `Conv1D`."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_path(config: RunConfig, *, is_new: bool = False) -> str:
    """Return the folder or hub name of the initial weights.

    Of a run that `is_new`, the files of examples must be those that the weights were made with.
    """
    if config.prefer is None:
        return warm_started_path(config, is_new=is_new)
    return _made_model("prefer", config.preferred, prefer_origin(config), is_new=is_new)


def warm_started_path(config: RunConfig, *, is_new: bool = False) -> str:
    """Return the folder or hub name of the weights before any preferences, as `model_path`."""
    if config.sft is None:
        if config.model.path is not None:
            return find_model(config.model.path)
        raise InputError(
            "the recipe builds a model from scratch ([model.tiny]) but has no [sft] section; "
            "random weights answer nothing, so there is nothing to reinforce"
        )
    return _made_model("sft", config.warm_start, warm_start_origin(config), is_new=is_new)


def _made_model(command: str, folder: Path, origin: str, *, is_new: bool) -> str:
    """Return the model folder that a command made, with the settings of this origin."""
    if not (folder / "config.json").exists():
        suffix = f"-{command}"
        made = sorted(folder.parents[1].glob(f"*{suffix}/model/{ORIGIN_FILE}"))
        same = [f.parents[1].name.removesuffix(suffix) for f in made if f.read_text() == origin]
        hint = f', or set {command}.name = "{same[0]}", which was made with these' if same else ""
        raise InputError(
            f"the recipe has the section [{command}], but {folder} does not exist yet; run "
            f"`headway {command}` with the same recipe and settings first{hint}"
        )
    anew = f"run `headway {command} --replace` with the same recipe and settings"
    anew += ", or choose another name"
    refuse_another_origin(folder, origin, anew, files=is_new)
    return str(folder.resolve())  # other nodes may have the target of a link, but not the link


def reward_model_paths(config: RunConfig, *, is_new: bool = False) -> tuple[str, ...]:
    """Return the folders or hub names of the reward models, if used, as `model_path` its own."""
    named, folder = config.actors.reward_model.named, config.reward_models
    if not config.actors.asks_reward_models:
        return ()
    if named:
        setting = "actors.reward_model." + (
            "kinds" if config.actors.reward_model.kinds else "paths"
        )
        return tuple(find_model(path, setting=setting) for path in named)
    members = sorted(folder.glob("model-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not members:
        raise InputError(
            f'the reward "reward_model" needs {folder}, which does not exist yet; run `headway '
            "reward-model` with the same recipe and settings first, or name model folders in "
            "actors.reward_model.paths"
        )
    refuse_another_origin(folder, reward_model_origin(config), REWARD_MODELS_ANEW, files=is_new)
    return tuple(str(path.absolute()) for path in members)


def teacher_paths(config: RunConfig) -> tuple[str, ...]:
    """Return the folders or hub names of the teachers, in the order of the recipe."""
    distillation = config.learner.distillation
    named = enumerate(distillation.teachers if distillation is not None else ())
    setting = "learner.distillation.teachers.{}.path"
    return tuple(find_model(one.path, setting=setting.format(number)) for number, one in named)


def check_teacher(teacher: str, path: str, context: int) -> None:
    """Refuse a teacher that cannot read what the model of `path` samples, `context` tokens long."""
    check_model(teacher)
    own, other = (load_tokenizer(model).get_vocab() for model in (path, teacher))
    if differ := sorted(text for text in own | other if own.get(text) != other.get(text)):
        shown = ", ".join(
            f"{text!r} is {own.get(text, 'missing')} and {other.get(text, 'missing')}"
            for text in differ[:3]
        )
        raise InputError(
            f"the teacher {teacher!r} has another vocabulary than {path!r}, whose tokens it would "
            f"score: {len(differ)} differ ({shown}); name a teacher with the same tokenizer"
        )
    words, known = (vocabulary_size(model) or len(own) for model in (path, teacher))
    if known < words:
        raise InputError(
            f"the teacher {teacher!r} has {known:,} rows of embeddings, and {path!r} may sample "
            f"{words:,} tokens; name a teacher with as many rows"
        )
    try:
        positions = context_length(teacher)
    except InputError:  # it names no longest sequence, as those that carry a state
        return
    if positions < context:
        raise InputError(
            f"the teacher {teacher!r} reads sequences of {positions:,} tokens, and engines make up "
            f"to {context:,}; set actors.max_model_len = {positions}, or name another teacher"
        )


def check_adapter(lora: LoraConfig | None, path: str, *, section: str) -> None:
    """Compare a section with the model of a folder, or with what a hub says of it."""
    if lora is None:
        return
    description = describe(path)
    layers: set[str] | None = None
    if Path(path).is_dir() and not _converts(description):
        transposed = description.get("model_type") in TRANSPOSED
        layers = set() if transposed else _linear_layers(weight_shapes(path))
    adapted_layers(lora, model=path, linear=layers, section=section)
    if lora.path is not None:
        check_form(stored_form(Path(lora.path))[0], lora, section)


def _converts(description: Mapping[str, Any]) -> bool:
    """Return True if transformers has other tensors of such a model than its folder."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return get_checkpoint_conversion_mapping(description.get("model_type")) is not None


def _linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of the layers of matrices inside numbered ones, but for experts."""
    split = (name.split(".") for name, shape in shapes.items() if len(shape) == 2)
    return {
        ".".join(parts[:-1])
        for parts in split
        if parts[-1] == "weight" and any(map(str.isdigit, parts)) and "experts" not in parts
    }


def check_workers(config: RunConfig, path: str) -> None:
    """Refuse engines of more workers than can share out the attention heads of the model."""
    size = config.actors.tensor_parallel_size
    if config.actors.engine != "vllm" or size == 1 or size in (allowed := parallel_sizes(path)):
        return
    heads, kv_heads = attention_heads(path)
    raise InputError(
        f"actors.tensor_parallel_size = {size}: the workers of an engine cannot share out the "
        f"{heads} attention heads of {path!r}, {kv_heads} of them with keys and values; allowed "
        f"are {', '.join(map(str, allowed))}"
    )


def way_of_rows(config: RunConfig) -> str:
    """Return a line that says how the learner will compute sequences; imports torch."""
    from learner.model.forward_check import foretold_way

    try:
        path = find_model(config.model.path) if config.model.path else model_path(config)
        context = config.actors.max_model_len or context_length(path)
        way = foretold_way(path, config.learner.attention, context)
    except (InputError, MemoryError) as error:
        return f"how sequences are computed is not foretold: {error}"
    return f"sequences are computed {way}"


def find_model(path: str, *, setting: str = "model.path") -> str:
    """Return the absolute folder, or the hub name, that a setting such as `model.path` names."""
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local.absolute())
    if local.exists():
        raise InputError(f"{setting} = {path!r} is a file; give the model folder that it is in")
    if not HUB_NAME.fullmatch(path):
        raise InputError(
            f"{setting} = {path!r}: there is no such folder from {Path.cwd()}; give a model "
            'folder, or a hub name of the form "organisation/name"'
        )
    return path


FILES = "files"
"""Key in `ORIGIN_FILE` of the fingerprints of files that the settings name."""
RENDERING = {
    "environment", "environment_options", "chat_template", "chat_template_options", "stop",
}  # fmt: skip
"""Keys of `[actors]` that decide how a demonstration is rendered."""


NEUTRAL = {"name", "ranks", "gpus", "checkpoint_every", "eval_every"}
"""Keys of `[sft]` and `[reward_model]` on which what is learned does not depend."""


TRAINED = {"sft": ["sft"], "prefer": ["sft", "prefer"], "reward-model": ["sft", "reward_model"]}
"""Sections of what the commands before reinforcement train."""
SCORING = {"seed", "prompts", "heldout", "actors"}
"""Keys on which scores depend."""
MADE = {"sft", "prefer", "reward_model", "pairs"}
"""Sections that a run does not read: it finds what their commands made."""


def settings_read(command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a recipe's settings on which what a command makes depends."""
    if command not in TRAINED:
        wanted = SCORING if command == "eval" else settings.keys() - MADE
        return {key: value for key, value in settings.items() if key in wanted}
    read = {key: settings[key] for key in ("seed", "model", *TRAINED[command])}
    for section in TRAINED[command]:
        own = settings[section]
        read[section] = own and {key: own[key] for key in own if key not in NEUTRAL}
    return read | {"actors": {key: settings["actors"][key] for key in sorted(RENDERING)}}


def files_read(command: str, config: RunConfig) -> dict[str, str]:
    """Return fingerprints of data files and model folders that a command reads, by their paths."""
    models = [config.model.path]
    if command in TRAINED:
        files: dict[str, str] = json.loads(_origin(command, config))[FILES]
        if command == "reward-model" and config.reward_model is not None:
            models.append(config.reward_model.path)
    else:
        files = of_files(config.model_dump(mode="json", include=SCORING))
        models += config.actors.reward_model.named
    folders = {path: Path(path).expanduser() for path in models if path}
    return files | {p: fingerprint_of_model(str(f)) for p, f in folders.items() if f.is_dir()}


def warm_start_origin(config: RunConfig) -> str:
    """Return the settings that a warm start depends on, and the files that they name, as JSON."""
    return _origin("sft", config)


def reward_model_origin(config: RunConfig) -> str:
    """Return the settings that reward models depend on, and the files that they name, as JSON."""
    return _origin("reward-model", config)


def prefer_origin(config: RunConfig) -> str:
    """Return the settings that the preferred model depends on, and their files, as JSON."""
    return _origin("prefer", config)


def _origin(command: str, config: RunConfig) -> str:
    origin = settings_read(command, config.model_dump(mode="json"))
    sections = [getattr(config, section) for section in TRAINED[command]]
    weights = [_weights_of(section.lora) for section in sections if section]
    heldout = config.heldout and [config.heldout_source[2], *config.heldout.sets.values()]
    origin[FILES] = of_files([origin, weights, heldout or ()])
    return json.dumps(origin, sort_keys=True)


def _weights_of(lora: LoraConfig | None) -> str:
    """Return the file of weights of an adapter to begin with, or "" without one."""
    return "" if lora is None or lora.path is None else str(Path(lora.path) / WEIGHTS_FILE)


def fingerprint_of_model(path: str) -> str:
    """Return a fingerprint of a model folder; of a name on the hub, the name."""
    if not Path(path).is_dir():
        return path
    return fingerprint(file for file in Path(path).iterdir() if file.is_file())


def refuse_another_origin(folder: Path, wanted: str, remedy: str, *, files: bool = False) -> None:
    """Refuse the folder of a warm start or of reward models that was made with other settings.

    `wanted` are the settings as JSON; `remedy` says in the error how to make a folder that fits.
    With `files`, those of examples and held-out problems must be the same too, unless they are
    gone: examples might have problems that are held out now.
    """
    present = json.loads(wanted)
    try:
        made = json.loads((folder / ORIGIN_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} has no record of what it was made with: {error}; {remedy}"
        ) from None
    differ = [
        f"{change.name} = {change.before}, not {change.after}"
        for change in changes(made | {FILES: None}, present | {FILES: None})
    ]
    if differ:
        shown = "; ".join(differ[:3]) + ("; and more" if len(differ) > 3 else "")
        raise InputError(f"{folder} was made with {shown}. For this recipe, {remedy}")
    for name, now in present[FILES].items() if files else ():
        if (then := made.get(FILES, {}).get(name, now)) != now:
            raise InputError(
                f"{folder} was made with another {name} ({then} then, {now} now). For this one, "
                f"{remedy}"
            )
