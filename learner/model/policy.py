"""Policies: building a tiny one from scratch, loading, and log-probabilities of packed tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learner.config.learner import TinyModelConfig
from learner.errors import InputError
from learner.model.logprobs import LogprobOptions, chunked_logprobs
from learner.model.packed_attention import attend_packed
from learner.model.tiny_tokenizer import tiny_tokenizer, vocabulary_of

RESHAPED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings of models whose logits are not plainly hidden states times the output embedding."""

PACKING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference in a log-probability that rounding explains."""


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


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a model folder or hub name.

    Raises:
        InputError: It cannot be loaded, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no tokenizer can be loaded from {path!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer in {path!r} has no end-of-sequence token, so no rollout could end"
        )
    return tokenizer


class Policy(nn.Module):
    """A causal language model whose output is the log-probabilities of packed tokens.

    With a value head it answers with values as well: of the state before each token, from the
    hidden state that the token is drawn from.
    """

    def __init__(
        self, model: Any, options: LogprobOptions, value_head: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.value_head = value_head

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the log-probability of every token given those before it in its sequence.

        `token_ids` [N] int64 are packed sequences, `position_ids` [N] int64 restart at 0 with each.
        The head is applied for the tokens `wanted` [N] bool; None: all.

        Returns:
            Log-probabilities [N] float32 with gradient; the entropy of the distribution each token
            was drawn from, [N] float32, with gradient if configured; and values [N] float32 if
            there is a value head. Entries of first tokens are 0, and so are, except for values,
            those of tokens that are not wanted.
        """
        hidden = self.model.base_model(
            input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False
        ).last_hidden_state[0]
        states, targets = hidden[:-1], token_ids[1:]
        if wanted is not None:
            # Also if none is wanted: the loss must reach every parameter on every rank.
            chosen = wanted[1:].nonzero().squeeze(-1)
            states, targets = states.index_select(0, chosen), targets[chosen]
        head = self.model.get_output_embeddings().weight
        scored = chunked_logprobs(states, head, targets, self.options)
        outputs = [*scored]
        if wanted is not None:
            zeros = scored[0].new_zeros(len(hidden) - 1)
            outputs = [zeros.index_copy(0, chosen, values) for values in scored]
        if self.value_head is not None:
            outputs.append(self.value_head(hidden[:-1]).squeeze(-1).float())
        return tuple(before_each(values, position_ids) for values in outputs)


def before_each(values: Tensor, position_ids: Tensor) -> Tensor:
    """Shift values after each token but the last, [N − 1], to before each token, [N].

    They are 0 before the first token of every sequence.
    """
    return nn.functional.pad(torch.where(position_ids[1:] > 0, values, 0.0), (1, 0))


def load_policy(
    path: str,
    options: LogprobOptions,
    *,
    dtype: str,
    attention: str,
    activation_checkpointing: bool = False,
    value_head: bool = False,
) -> Policy:
    """Load a causal language model for training on packed sequences.

    `value_head` adds a head for values, whose output is 0 at first.

    Raises:
        InputError: The folder holds no model that can be loaded, or one that cannot be packed.
    """
    quiet()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"no language model can be loaded from {path!r}: {error}") from error
    reshaped = [name for name in RESHAPED_LOGITS if getattr(config, name, None) not in (None, 1.0)]
    if reshaped or getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise InputError(
            f"{path!r} changes its logits after the output embedding "
            f"({', '.join(reshaped) or 'a bias'}), which log-probabilities here leave out"
        )
    attend_packed(model)
    if activation_checkpointing:
        checkpoint_activations(model, path)
    return Policy(model, options, _value_head(model) if value_head else None)


def _value_head(model: Any) -> nn.Linear:
    weight = model.get_output_embeddings().weight
    head = nn.Linear(weight.shape[1], 1, bias=False, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    return head


def checkpoint_activations(model: Any, path: str) -> None:
    """Have transformers compute the insides of layers again in the backward pass.

    Raises:
        InputError: The model cannot.
    """
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"learner.activation_checkpointing with {path!r}: {error}") from error
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            # transformers checkpoints layers in training mode only; what is inside of them stays
            # in evaluation mode, so that no dropout comes in.
            module.training = True


@torch.no_grad()
def check_packing(forward: Callable[[Tensor, Tensor], tuple[Tensor, ...]], *, dtype: str) -> None:
    """Compare the first output for two short sequences packed together with each alone.

    Raises:
        InputError: The sequences see each other: linear attention, convolutions, or an attention
            implementation that ignores where position_ids restart.
    """
    sequences = [torch.tensor([5, 3, 7, 4]), torch.tensor([4, 7, 3, 5, 6])]
    positions = [torch.arange(len(sequence)) for sequence in sequences]
    packed = forward(torch.cat(sequences), torch.cat(positions))[0]
    alone = torch.cat([forward(*one)[0] for one in zip(sequences, positions, strict=True)])
    difference = float((packed - alone).abs().max())
    if difference > PACKING_TOLERANCE[dtype]:
        raise InputError(
            f"sequences packed together see each other (log-probabilities differ by "
            f"{difference:.3g}): this model's layers ignore position_ids, as linear attention and "
            "convolutions do; only models with plain attention can be trained"
        )
