"""`headway init --model`: writes a recipe to begin with, which fits a model and this machine.

Rows are keys of the recipe, each with its value and the reason for it, which stands beside it. The
planner decides what fits into memory, and with which settings.
"""

import tomllib
from pathlib import Path
from typing import Any

from actors.engines import model_folder
from actors.engines.sampling_rules import check_sampling
from actors.errors import PromptRefused
from actors.rollout.chat_rendering import Renderer, read_by
from actors.rollout.prompt_checks import check_fit
from deploy.config.devices import for_this_machine, visible_gpus
from deploy.config.loader import completed
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.planner.model_sizes import measure
from deploy.planner.node_memory import gib
from deploy.planner.process_memory import total
from deploy.planner.remedies import fitted
from deploy.preflight.memory_check import capacity_of
from deploy.preflight.models import check_adapter, find_model
from headway.errors import HeadwayError, InputError
from learner.engine.model_folder import WEIGHTS
from queues.records import Prompt

Rows = dict[str, tuple[Any, str]]
"""Values of keys with the reasons for them."""
QUESTION = "Which is the last letter of {word}? Answer with that letter alone."
GROUP = 8


def recipe_for(model: str) -> tuple[str, list[str]]:
    """Return the text of a recipe for a model folder or hub name, and notes about it.

    It names the source and the reward of the starter's `my_task.py`.

    Raises:
        InputError: The model cannot be read or trained, or does not fit this machine.
    """
    path = find_model(model, setting="--model")
    notes, gpus = _check(path), visible_gpus()
    rows = _rows(path, gpus)
    try:
        weights = measure(_config(rows), path).policy.parameters
    except HeadwayError as error:
        notes.append(f"memory is not predicted: {error}")
    else:
        rows = _planned(rows, path, gpus, weights)
    own = model_folder.served_dtype(path, "auto").replace("auto", "no dtype of its own")
    here = _config(rows).learner.dtype
    rows["learner.dtype"] = "auto", f"{here} here, for engines too; the folder has {own}"
    return f"# A recipe to begin with, for {path!r} on this machine.\n{_text(rows)}", notes


def _check(path: str) -> list[str]:
    """Refuse a model that cannot be trained; return a note on a folder without weights."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else []
    weights = [file for file in files if file.suffix in WEIGHTS]
    has_weights = not files or any(file.suffix == ".safetensors" for file in weights)
    if any(file.name == "adapter_config.json" for file in files):
        raise InputError(
            f"--model {path!r} is an adapter (it has adapter_config.json); give the model that its "
            "base_model_name_or_path names, and the adapter in learner.lora.path of the recipe"
        )
    if weights and not has_weights:
        raise InputError(
            f"--model {path!r} has its weights in {weights[0].name}, and no *.safetensors; give "
            "a folder as save_pretrained of transformers writes it"
        )
    model_folder.check_model(path, weights=has_weights)
    check_sampling(path)
    return [] if has_weights else [f"{path} has no *.safetensors yet, which a run needs"]


def _rows(path: str, gpus: int) -> Rows:
    """Return the rows that follow from tokenizer, configuration and the number of GPUs."""
    context = model_folder.context_length(path)
    longest, groups = min(context, 2048 if gpus else 512), 64 if gpus > 1 else 32 if gpus else 8
    tokenizer, here = model_folder.load_tokenizer(path), "on GPUs" if gpus else "without GPUs"
    renderer, options = Renderer(tokenizer), read_by(tokenizer, {"enable_thinking": False})
    template = (True, "of the tokenizer") if renderer.templated else ("auto", "there is none")
    thinks = {"actors.chat_template_options": (options, "thoughts would fill max_new_tokens")}
    rows: Rows = {
        "name": ("mine", "the folder of the run is runs/mine"),
        "preset": ("cispo", "it corrects for stale rollouts; `headway presets` lists others"),
        "steps": (200, "batches to train"),
        "model.path": (path, "its memory is not predicted"),
        "prompts.source": ("my_task:LastLetter", 'of my_task.py; or "files" for a JSONL file'),
        "prompts.source_options": ({"question": QUESTION}, "a task to replace by yours"),
        "prompts.groups_per_batch": (groups, f"{groups * GROUP} rollouts a batch {here}"),
        "prompts.group_size": (GROUP, "rollouts of a prompt; more where few of them are right"),
        "heldout.size": (100, "problems that are never trained"),
        "heldout.every": (20, "versions from one evaluation to the next"),
        "actors.reward": (["my_task:score"], "of my_task.py"),
        "actors.chat_template": template,
        **(thinks if options else {}),
        "actors.stop": _stop(renderer, model_folder.end_ids(path, tokenizer)),
        "actors.max_new_tokens": (longest // 2, f"enough for short answers {here}"),
        "actors.max_model_len": (longest, f"with its prompt; the model has {context:,}"),
        "queues.max_staleness": (2, "η: one batch trains while engines hold about one more"),
        "learner.dtype": ("auto", ""),
        "learner.microbatch_tokens": (8192 if gpus else 2048, f"tokens of one pass {here}"),
        **_devices(gpus, 1),
    }
    if not gpus:
        rows["deploy.watchdog_seconds"] = 1800, "a batch may take minutes without GPUs"
    try:
        _check_prompt(rows, path, QUESTION)
    except InputError:
        rows["prompts.source_options"] = {}, "the model cannot read a question, only the word"
        _check_prompt(rows, path, "{word}=")
    return rows


def _check_prompt(rows: Rows, path: str, question: str) -> None:
    prompt = Prompt(prompt_id="of the starter", text=question.format(word="abcdef"))
    check_fit(path, _config(rows).actors, [prompt])


def _stop(renderer: Renderer, ends: frozenset[int]) -> tuple[list[str | int], str]:
    """Return the end of messages in the chat template if it is no end of sequence of the model."""
    by_model = f"the model ends at {renderer.tokenizer.convert_ids_to_tokens(sorted(ends))}"
    try:
        end = renderer.turn_end().strip()
    except (InputError, PromptRefused):  # a template of use for single turns all the same
        end = ""
    if not end or {*renderer.turn_end_ids} & ends:
        return [], by_model
    texts = {number: text for text, number in renderer.control.special.items()}
    stop = [texts.get(number, number) for number in renderer.turn_end_ids] or [end]
    return stop, f"of the chat template; {by_model}"


def _devices(gpus: int, workers: int) -> Rows:
    """Return the rows that share out GPUs, `workers` of them to an engine."""
    count = max(1, gpus // 2 // workers)
    of_engine, of_rank = (workers, 1) if gpus > 1 else (gpus / 2, gpus / 2)
    held = max(GROUP, 512 // count) if gpus > 1 else 256 if gpus else 64
    why = f"of {gpus}; engines take half of them" if gpus else "there is none"
    return {
        "actors.count": (count, "engines"),
        "actors.max_concurrent_rollouts": (held, "all engines hold about a batch"),
        "actors.gpus": (of_engine, why),
        "actors.tensor_parallel_size": (workers, "GPUs, or CPUs, that share an engine"),
        "learner.ranks": (max(1, gpus - count * workers), "processes that share a batch"),
        "learner.gpus": (of_rank, why),
    }


def _planned(rows: Rows, path: str, gpus: int, weights: int) -> Rows:
    """Return the rows with which whole weights fit into memory, or else those of an adapter.

    Raises InputError, with what either lacks, if neither fits.
    """
    lacking, rates = [], (1e-6, 1e-5) if weights >= 1_000_000_000 else (5e-6, 5e-5)
    whole: Rows = {"learner.learning_rate": (rates[0], "an adapter wants ten times as much")}
    adapter: Rows = {
        "learner.learning_rate": (rates[1], "ten times that of whole weights"),
        "learner.lora.rank": (32, "an adapter: whole weights would not fit into memory"),
    }
    sizes = [size for size in model_folder.parallel_sizes(path) if size <= max(1, gpus // 2)]
    for form, size in [(form, size) for form in (whole, adapter) for size in sizes]:
        chosen = rows | _devices(gpus, size) | form
        config = _config(chosen)
        capacity = capacity_of(config)
        settings, plan, _ = fitted(config, lambda changed: measure(changed, path), capacity)
        if plan.lacks or (form is whole and "learner.offload_optimizer" in settings):
            name = "whole" if form is whole else "with an adapter"
            lacking += [f"\n{name}: {lack.text}" for lack in plan.lacks if size == 1]
            continue
        chosen |= {key: (value, "else memory lacks") for key, value in settings.items()}
        if any(Path(path).glob("*.safetensors")):
            check_adapter(_config(chosen).learner.lora, path, section="learner.lora")
        needs = [f"{p.role} {gib(total(p.device or p.resident))} GiB" for p in plan.processes]
        chosen["model.path"] = path, f"{weights:,} weights; predicted: {', '.join(needs)}"
        return chosen
    raise InputError(
        f"{path!r}, {weights:,} weights, does not fit into the memory of this machine"
        + "".join(lacking)
        + "\ntake a smaller model, or more or larger GPUs, or a cluster (deploy/docs/memory.md)"
    )


def _config(rows: Rows) -> RunConfig:
    """Return the recipe of some rows, completed for this machine."""
    return for_this_machine(completed(tomllib.loads(_text(rows)), "of --model"))


def _text(rows: Rows) -> str:
    """Return rows as TOML, those of a section together, each with its reason."""
    order, lines = [*dict.fromkeys(key.partition(".")[0] for key in rows)], list[str]()
    for key in sorted(rows, key=lambda key: order.index(key.partition(".")[0])):
        value, reason = rows[key]
        line = f"{key} = {toml_value(value)}"
        is_short = len(line) + len(reason) < 100
        lines += [f"{line:40}  # {reason}"] if is_short else [f"# {reason}", line]
    return "\n".join(lines) + "\n"
