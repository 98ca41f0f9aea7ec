"""The check of a loaded model: what is trained here is what its own forward pass computes.

Packed rows, attention by sequences and log-probabilities from hidden states are right for some
models only, and no list of settings could name them all. So outputs are compared. Copies of a few
layers are compared in float32 with a model that is built anew from the folder, by which the way to
compute rows is chosen; then the whole model with itself, in its own dtype.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headway.errors import InputError, first_line
from learner.model import lora
from learner.model.few_layers import Gathered, OtherLayers, few_layers
from learner.model.forward_comparison import REACH, Comparison, Run, Unfit
from learner.model.hf_names import HuggingFaceNames, stored_weights
from learner.model.logprobs import LogprobOptions
from learner.model.packed_attention import BY_SEQUENCE, attend_packed, plain_name
from learner.model.policy import Policy, choice_of
from learner.model.rope import grows
from learner.model.shared_weights import is_shared
from learner.model.ways import SequenceModel, Way

log = logging.getLogger(__name__)

FEW_WORDS, FEW_TOKENS = 1024, 64
"""Words of a model whose way is foretold, and most tokens of its windows and chunks."""


@torch.no_grad()
def check_forward(module: SequenceModel, run: Run, *, device: torch.device) -> None:
    """Compare a model's outputs with those of its own forward pass. Collective.

    `run` computes the module for token_ids [N] and position_ids [N], which lie on `device`; `own`
    of the module gives the end of the first output by transformers alone. Weights that ranks share
    must have passed `choose_way` before.

    Raises:
        InputError: They differ, or sequences in a row depend on each other, or it cannot be run.
    """
    if not is_shared(module):
        choose_way(module)
    with _refused(_name(module)):
        Comparison(module, run, module, device).all()


@torch.no_grad()
def choose_way(module: SequenceModel, gathered: Gathered | None = None) -> None:
    """Choose how rows are computed: the first way and attention that are exact. Collective.

    Copies of a few layers in float32 are compared with a model that is built anew from the folder,
    and weights with those of its files. `gathered` returns a context in which parameters are whole.

    Raises:
        InputError: No way computes what the model's folder describes.
    """
    with _refused(_name(module)):
        _compare_weights(module.model, gathered or (lambda _: nullcontext()))
        copied, described = few_layers(module, gathered)
        with lora.switched_off(copied.model):
            _choose(copied, described)
    module.way, module.of_head = copied.way, copied.of_head
    chosen, own = (each.model.config._attn_implementation for each in (copied, module))
    if chosen != own and plain_name(own) in BY_SEQUENCE:
        module.model.set_attn_implementation(chosen)
    log.info("%s: sequences are computed %s", _name(module), _described(module))


def _name(module: SequenceModel) -> str:
    return str(module.model.name_or_path or type(module.model).__name__)


def _described(module: SequenceModel) -> str:
    attention = plain_name(module.model.config._attn_implementation)
    return f"{module.way.value}, with attention = {attention!r}"


@torch.no_grad()
def foretold_way(path: str, attention: str, context: int | None) -> str:
    """Return how rows would be computed by a model of a folder, whose weights are not read.

    Its layers of each kind are given random weights, few words and short windows.

    Raises:
        InputError: In no way exactly.
        MemoryError: These layers are too large.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = None if attention == "auto" else attention
    with _refused(path), torch.random.fork_rng():
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        config.name_or_path, text = "", config.get_text_config()
        text.vocab_size = min(text.vocab_size, FEW_WORDS)
        for name, size in list(vars(text).items()):
            if isinstance(size, int) and size > FEW_TOKENS and REACH.search(name):
                setattr(text, name, FEW_TOKENS)
        if (text.pad_token_id or 0) >= text.vocab_size:
            text.pad_token_id = None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=chosen).eval()
        policy = Policy(model, LogprobOptions(chunk=1024))
        policy.context, policy.attentions = context, choice_of(model, attention)
        copied, described = few_layers(policy)
        _choose(copied, described)
    return _described(copied)


def _choose(copied: SequenceModel, described: SequenceModel) -> None:
    """Set the first way and attention of a module by which it equals another."""
    device = copied.model.device
    attentions = copied.attentions or (plain_name(copied.model.config._attn_implementation),)
    copied.of_head = _changed_before_head(described)
    unpinned = copied.context is None and grows(copied.model)
    for way, attention in product([Way.ALONE] if unpinned else Way, attentions):
        copied.way = way
        copied.model.set_attn_implementation(attention)
        if way is Way.PACKED:
            attend_packed(copied.model)
        try:
            Comparison(copied, copied, described, device).all()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model raises anything if it is not called as it wants to be
            log.debug("%s, attention = %r: %s", way.value, attention, error)
            if (way, attention) == (Way.ALONE, attentions[-1]):
                raise
        else:
            return


def _changed_before_head(module: SequenceModel) -> bool:
    """Return True if the head is given something else than the last hidden states."""
    module.way, states = Way.ALONE, list[Tensor | None]()
    ids, positions = torch.arange(3, 8).to(module.model.device), torch.arange(5)
    for module.of_head in (False, True):
        try:
            states.append(module.hidden_states(ids, positions))
        except Exception:  # noqa: BLE001  # without a base model, or one word makes no logits
            states.append(None)
    last, given = states
    if given is None or not isinstance(module, Policy):
        return False
    return last is None or not torch.equal(last, given)


def _compare_weights(model: Any, gathered: Gathered) -> None:
    """Require that each weight is that of the model's folder, in the model's dtype."""
    stored = stored_weights(model)

    def loaded() -> Iterator[tuple[str, Tensor]]:
        for weight in lora.weights(model):
            with gathered([weight.parameters[0]]):
                yield weight.name, weight.parameters[0].detach()

    if getattr(model.config, "quantization_config", None) is not None or not stored:
        return
    for name, tensor in HuggingFaceNames(model).of(loaded()):
        if name in stored:
            expected = stored[name].get_tensor(name).to(tensor)
            if tensor.shape != expected.shape:
                raise Unfit(f"its weight {name} is {tensor.shape}, its folder's {expected.shape}")
            if not torch.equal(tensor, expected):
                difference = float((tensor.float() - expected.float()).abs().max())
                raise Unfit(f"its weight {name} is not its folder's (by {difference:.3g})")


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Say of which model a refusal is."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a model raises anything if it is not called as it wants to be
        reason = first_line(error)
        if not isinstance(error, Unfit | OtherLayers):
            reason = f"it cannot be computed on sequences in a row: {reason}"
        raise InputError(f"{name!r} cannot be trained here: {reason}") from error
