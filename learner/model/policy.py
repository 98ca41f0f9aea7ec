"""Policies: building a tiny one from scratch, loading, and log-probabilities of packed tokens."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headway.errors import InputError, first_line
from learner.config.learner import TinyModelConfig
from learner.model.compilation import compile_blocks
from learner.model.logprobs import LogprobOptions, chunked_logprobs, likeliest_words
from learner.model.packed_attention import BY_SEQUENCE, attend_packed
from learner.model.rope import pin_rope
from learner.model.shared_weights import is_shared, shape_of
from learner.model.tiny_tokenizer import tiny_tokenizer, vocabulary_of
from learner.model.ways import SequenceModel

log = logging.getLogger(__name__)


def build_tiny(config: TinyModelConfig, folder: Path, *, seed: int) -> None:
    """Write a Qwen3 with random weights and its character tokenizer as a model folder."""
    quiet()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny_tokenizer(config.characters, config.context).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(vocabulary_of(config.characters)),
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.context,
                initializer_range=config.initializer_range,
                tie_word_embeddings=True,
                pad_token_id=0,
                eos_token_id=1,
                bos_token_id=2,
            )
        )
    model.to(torch.float32).save_pretrained(folder)


def quiet() -> None:
    """Switch off transformers' progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()


Module = TypeVar("Module", bound=SequenceModel)


class Policy(SequenceModel):
    """A causal language model whose output is the log-probabilities of packed tokens.

    With a value head it answers with values as well: of the state before each token, from the
    hidden state that the token is drawn from; and where `values_after`, of the state after it.
    """

    output = "log-probabilities"

    def __init__(self, model: Any, options: LogprobOptions) -> None:
        super().__init__(model)
        self.options = replace(options, **_form_of_logits(model.config.get_text_config()))
        self.value_head: nn.Linear | None = None
        self.values_after = False
        """Answer with values after each token too."""
        self.likeliest: tuple[int, int] | None = None
        """Answer with so many of the first words, by `likeliest_words`, and nothing else."""

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        wanted: Tensor | None = None,
        others: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the log-probability of every token given those before it in its sequence.

        `token_ids` [N] int64 are packed sequences, `position_ids` [N] int64 restart at 0 with each.
        The head is applied for the tokens `wanted` [N] bool; None: all. `others` [N, K] int64 are
        tokens that might stand in the place of each.

        Returns:
            Log-probabilities [N] float32 with gradient; the entropy of the distribution each token
            was drawn from, [N] float32, with gradient if configured; log-probabilities [N, K] of
            `others` if given; and values [N] float32 if there is a value head. Entries of first
            tokens are 0, and so are, except for values, those of tokens that are not wanted. Then,
            with `values_after`, those values [N]. With `likeliest`, two tensors [N, K].
        """
        hidden = self.hidden_states(token_ids, position_ids)
        states, targets = hidden[:-1], token_ids[1:]
        if others is not None:
            targets = torch.cat([targets[:, None], others[1:]], dim=1)
        if wanted is not None:
            # Also if none is wanted: the loss must reach every parameter on every rank.
            chosen = wanted[1:].nonzero().squeeze(-1)
            states, targets = states.index_select(0, chosen), targets[chosen]
        head: Tensor = self.model.get_output_embeddings().weight
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        if bias is not None:  # as one more entry of hidden states, which is 1
            head = torch.cat([head, bias[:, None]], dim=1)
            states = nn.functional.pad(states, (0, 1), value=1.0)
        if self.likeliest is not None:
            outputs = [*likeliest_words(states, head, *self.likeliest, self.options)]
        else:
            outputs = [*chunked_logprobs(states, head, targets, self.options)]
            if others is not None:
                outputs = [outputs[0][:, 0], outputs[1], outputs[0][:, 1:]]
        if wanted is not None:
            outputs = [
                values.new_zeros(len(hidden) - 1, *values.shape[1:]).index_copy(0, chosen, values)
                for values in outputs
            ]
        after = () if self.value_head is None else (self.value_head(hidden).squeeze(-1).float(),)
        outputs += [values[:-1] for values in after]
        before = tuple(before_each(values, position_ids) for values in outputs)
        return (*before, *after) if self.values_after else before

    def add_value_head(self) -> None:
        """Add a head for values, whose output is 0 at first."""
        weight = self.model.get_output_embeddings().weight
        self.value_head = nn.Linear(shape_of(weight)[1], 1, bias=False, dtype=weight.dtype)
        nn.init.zeros_(self.value_head.weight)

    def own(self, token_ids: Tensor) -> Tensor:
        """Compute the log-probabilities [N − 1] of one sequence from the model's own logits."""
        logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        chosen = []
        for some, ids in zip(
            torch.split(logits, self.options.chunk),
            torch.split(token_ids[1:, None], self.options.chunk),
            strict=True,
        ):
            scores = (some.float() / self.options.temperature).log_softmax(-1)
            chosen.append(scores.gather(-1, ids)[:, 0])
        return torch.cat(chosen)


def _form_of_logits(config: Any) -> dict[str, Any]:
    """Return the scale and the cap of a model's logits; `check_forward` finds what is missing."""

    def first(*names: str) -> float | None:
        values = (vars(config).get(name) for name in names)  # no property, which may scale states
        return next((value for value in values if value and isinstance(value, int | float)), None)

    scale = first("logit_scale", "lm_head_multiplier") or 1.0
    caps = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
    return {"scale": scale / (first("logits_scaling") or 1.0), "cap": first(*caps)}


def before_each(values: Tensor, position_ids: Tensor) -> Tensor:
    """Shift values after each token but the last, [N − 1] or [N − 1, K], to before each token.

    They are 0 before the first token of every sequence.
    """
    follows = (position_ids[1:] > 0).view(-1, *[1] * (values.dim() - 1))
    zeros = values.new_zeros(1, *values.shape[1:])
    return torch.cat([zeros, torch.where(follows, values, zeros)])


def load_pretrained(
    kind: Any, path: str, what: str, *, dtype: str, attention: str, **options: Any
) -> Any:
    """Load a model by an auto class of transformers; `what` it makes is for the error message.

    With the attention "auto" transformers chooses, and `check_forward` thereafter.

    Raises:
        InputError: The folder or hub name has no such model, or lacks weights other than of a new
            head `score`.
    """
    quiet()
    chosen = None if attention == "auto" else attention
    options |= {"dtype": getattr(torch, dtype), "attn_implementation": chosen}
    options |= {"use_safetensors": True, "trust_remote_code": False}  # no pickle, nor code of it
    try:
        model, report = kind.from_pretrained(path, output_loading_info=True, **options)
    except Exception as error:  # a configuration raises whatever its author chose
        raise InputError(f"no {what} can be loaded from {path!r}: {first_line(error)}") from error
    made = {"score.weight", *(name for name, _ in model.named_buffers())}
    if lacking := sorted(report["missing_keys"] - made):
        raise InputError(
            f"no {what} can be loaded from {path!r}: it lacks {len(lacking)} of the weights, which "
            f"transformers would make up ({', '.join(lacking[:3])})"
        )
    return model


def load_policy(
    path: str,
    options: LogprobOptions,
    *,
    dtype: str,
    attention: str,
    **preparation: Any,
) -> Policy:
    """Load a causal language model for training on packed sequences; `preparation` as `prepare`.

    Raises:
        InputError: The folder holds no model that can be loaded, or one that cannot be packed.
    """
    from transformers import AutoModelForCausalLM

    model = load_pretrained(
        AutoModelForCausalLM, path, "language model", dtype=dtype, attention=attention
    )
    balance = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0)
    if balance:
        log.warning(
            "%s: router_aux_loss_coef = %g has no effect; the loss has no term that balances the "
            "load of experts",
            path,
            balance,
        )
    return prepare(Policy(model, options), path, attention=attention, **preparation)


def prepare(
    module: Module,
    path: str,
    *,
    attention: str,
    context: int | None = None,
    activation_checkpointing: bool = False,
    compiled: bool = False,
) -> Module:
    """Make a loaded model fit for rows of sequences, if it can be; `check_forward` decides.

    `context` is the longest sequence of the engines in tokens, which `pin_rope` needs. Blocks whose
    weights are shared out over ranks are not `compiled`.

    Raises:
        InputError: Its positions differ from those of the engines, or it cannot checkpoint.
    """
    model, module.context = module.model, context
    module.attentions = choice_of(model, attention)
    pin_rope(model, path, context)
    if not is_shared(model):  # else when the engine can compute it
        attend_packed(model)
        if compiled:
            compile_blocks(model)
    if activation_checkpointing:
        checkpoint_activations(model, path)
    return module


def choice_of(model: Any, attention: str) -> tuple[str, ...]:
    """Return the implementations that an attention of a recipe may be computed by in float32."""
    own = model.config._attn_implementation
    both = dict.fromkeys([own if own in BY_SEQUENCE else "sdpa", "eager"])
    return (own,) if attention in BY_SEQUENCE else tuple(both)


def checkpoint_activations(model: Any, path: str) -> None:
    """Have transformers compute the insides of layers again in the backward pass.

    Raises:
        InputError: The model has no way to.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not (layers and model.supports_gradient_checkpointing):
        raise InputError(
            f"activation_checkpointing with {path!r}: transformers cannot checkpoint the layers of "
            f"{type(model).__name__}; set activation_checkpointing = false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        # It is checkpointed in training mode only. While it computes it is in evaluation mode, as
        # the whole model is, so that no dropout comes in.
        layer.training = True
        layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", False))
        layer.register_forward_hook(
            lambda layer, *_: setattr(layer, "training", True), always_call=True
        )
