"""Settings of adapters: the sections `lora` of learner, critic, warm start and reward model."""

import json
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from safetensors import SafetensorError, safe_open

from headway.errors import InputError
from headway.recipe_section import ResumeRule, Section
from weight_sync.adapter import PREFIX, A

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
IRRELEVANT = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "r", "revision", "target_modules",
    "task_type", "use_rslora",
})  # fmt: skip
"""Settings of PEFT's that leave a layer W + scale · B A, or that names of tensors show."""
FORM = {"rank", "alpha", "rslora", "targets"}
"""Settings that an adapter's folder has too."""
ADAPTED = ResumeRule("its checkpoints have the factors of this adapter")
Word = Annotated[str, Field(min_length=1)]
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (["score"], ["classifier", "score"], ["score", "classifier"]),
    "peft_type": ("LORA",),
}
"""Values of other settings of PEFT's that do so; all that are empty or false do too."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA): linear layers W stay as they are, and W + scale · B A is used.

    Only the factors A [rank, in] and B [out, rank] have gradients and optimizer state, are in
    checkpoints, and travel to the engines. A is random and B is 0 at first.
    """

    rank: int = Field(default=16, ge=1)
    """Rank of the change of a layer."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is alpha / rank."""
    rslora: bool = False
    """The scale is alpha / √rank (rank-stabilised LoRA)."""
    targets: Word | Annotated[tuple[Word, ...], Field(min_length=1)] = "all-linear"
    """Linear layers that get factors, as PEFT's `target_modules`: all but the head, or names of
    some or their last parts, such as ["q_proj", "mlp.up_proj"], or a regular expression of whole
    names. Experts that are held as one tensor get none."""
    path: Word | None = None
    """Folder of an adapter to begin with, as PEFT writes it. Settings of this section that are left
    out are its own; others must be the same. None begins with the model as it is. The reference of
    a KL penalty has no adapter either way."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return path and str(Path(path).expanduser().absolute())

    @field_validator("targets")
    @classmethod
    def _compiles(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        try:
            re.compile(targets if isinstance(targets, str) else "")
        except re.error as error:
            raise ValueError(f"{targets!r} is no regular expression: {error}") from None
        return targets

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def with_stored_form(section: Any) -> Any:
    """Return a section, as a recipe has it, with the settings that it leaves out of its adapter.

    It stays as it is without an adapter to begin with, or where that is not here.

    Raises:
        InputError: The adapter has another form than `LoraConfig` can describe.
    """
    path = section.get("path") if isinstance(section, dict) else None
    if not isinstance(path, str) or section.keys() >= FORM:
        return section
    folder = Path(path).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        return section
    return stored_form(folder)[0].model_dump(mode="json", include=FORM) | section


def check_form(stored: LoraConfig, wanted: LoraConfig, section: str) -> None:
    """Compare the form of the adapter to begin with to that of a section of a recipe.

    Raises:
        InputError: Rank or scale differ; names both.
    """
    present, named = (form.model_dump(include=FORM - {"targets"}) for form in (stored, wanted))
    if present != named:
        raise InputError(f"{section}.path = {wanted.path!r} has {present}, and the recipe {named}")


def targeted(targets: str | Collection[str], layers: Collection[str]) -> set[str]:
    """Return which of the layers PEFT's `target_modules` names."""
    if targets == "all-linear":
        return set(layers)
    if isinstance(targets, str):
        return {layer for layer in layers if re.fullmatch(targets, layer)}
    return {
        layer for layer in layers if any(f".{layer}".endswith(f".{target}") for target in targets)
    }


def adapted_layers(
    config: LoraConfig,
    *,
    model: str,
    linear: Collection[str] | None,
    section: str,
) -> set[str]:
    """Return the names of the layers that get factors.

    `model` is the folder or hub name of the model and `linear` has the names of its linear layers;
    None: they are not known, and neither checked nor returned. `section` is the one of the recipe.

    Raises:
        InputError: It has no such layers.
    """
    if linear is None:
        return set()
    layers = targeted(config.targets, linear)
    words = () if isinstance(config.targets, str) else config.targets
    missing = ", ".join(sorted(word for word in words if not targeted([word], linear)))
    if missing or not layers:
        present = ", ".join(sorted({layer.split(".")[-1] for layer in linear}))
        regex = isinstance(config.targets, str) and linear
        raise InputError(
            f"{section}.targets = {config.targets!r}: {model!r} has no linear layers "
            f"{missing or ('that it matches' if regex else 'at all')}; those that can have an "
            f"adapter are {present or 'none'}"
        )
    return layers


def stored_form(folder: Path) -> tuple[LoraConfig, str]:
    """Return the form of an adapter that PEFT wrote, and folder or hub name of its model.

    Raises:
        InputError: The description is missing or damaged, or of another form of adapter.
    """
    file = folder / CONFIG_FILE
    try:
        settings = json.loads(file.read_text())
        other = {
            name: value
            for name, value in settings.items()
            if value and name not in IRRELEVANT and value not in PLAIN.get(name, ())
        }
        if other:
            raise ValueError(f"its {other} is not supported: W + scale · B A is")
        if settings["lora_alpha"] <= 0:
            raise ValueError(
                f"its lora_alpha = {settings['lora_alpha']} must be above 0: at 0 it changes "
                "nothing, whatever it is trained to"
            )
        config = LoraConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            rslora=settings.get("use_rslora", False),
            targets=_stored_targets(folder / WEIGHTS_FILE, settings),
            path=str(folder),
        )
        return config, settings.get("base_model_name_or_path") or ""  # PEFT may not know it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"no adapter can be read from {str(folder)!r}: {file.name}: {error}; give the folder "
            "of an adapter as PEFT writes it"
        ) from error


def _stored_targets(file: Path, settings: Mapping[str, Any]) -> Any:
    """Return the targets of an adapter, or its layers by name where other settings choose some."""
    targets = settings["target_modules"]
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = [name for name in tensors.keys() if name.endswith(A)]  # noqa: SIM118
    except (OSError, SafetensorError):  # `lora.read_adapter` says so
        return targets
    layers = {name.removeprefix(PREFIX).removesuffix(A) for name in names}
    if settings.get("exclude_modules") or settings.get("layers_to_transform") is not None:
        return sorted(layers)
    if isinstance(targets, str):
        return targets
    return [target for target in targets if targeted([target], layers)] or targets
