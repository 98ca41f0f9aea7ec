"""The comparison of a model, as it is computed here, with its own forward pass.

Sequences of which one is longer than every window of the model are computed each alone, and all in
one row. In float32 every output must agree; in bfloat16 medians, by what rounding moves them.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from learner.model.logprobs import bend
from learner.model.packed_attention import plain_attention, plain_name
from learner.model.policy import Policy
from learner.model.ways import PADDING, SequenceModel, Way

log = logging.getLogger(__name__)

SHORT, SHORTEST, LONGEST = 7, 96, 8192 + 32
"""Tokens of the first sequence, and fewest and most of the second; fewer where the model has fewer
positions. What a model does beyond `LONGEST` is not compared."""

REACH = re.compile("window|chunk|local|floor|topk")
"""Parts of the names of settings that say how far, or how many tokens, a token sees. They only
choose the length, and are logged."""

WRITTEN_OUT = 2048
"""Longest sequence whose attention the model computes step by step, with a score for each pair."""

LARGE_LOGIT = 50.0
"""Size that logits are brought to, to see whether the model caps or scales them."""

TOLERANCE = 1e-4
"""Difference that rounding explains in float32."""

ROUNDINGS = 6.0
"""Difference that rounding explains in bfloat16, for the median token of `BLOCK`: a multiple of
what one unit in the last place of the embeddings makes. Measured on models of 2 to 32 layers, it is
at most 1.3 of that where nothing is wrong (3 for single scores), and from 12 without windows."""

BLOCK = 32
"""Tokens of a median, since rounding may choose other experts for single tokens."""

SEED = 0
"""Chooses the tokens of sequences."""

Run = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Unfit(Exception):
    """The model is not computed as it computes itself."""


class Comparison:
    """A comparison of a module, as `run` computes it, with what another computes by itself."""

    def __init__(
        self, module: SequenceModel, run: Run, described: SequenceModel, device: torch.device
    ) -> None:
        self._module, self._run, self._device = module, run, device
        self._described = described
        config = described.model.config
        self._attention = plain_name(module.model.config._attn_implementation)
        settings = list(_integers(config.to_dict()))
        text = config.get_text_config()
        self._positions = getattr(text, "max_position_embeddings", None) or LONGEST
        reach = {name: size for name, size in settings if size > 1 and REACH.search(name)}
        long = max([SHORTEST, *(size for size in reach.values() if size <= LONGEST - 32)]) + 32
        if module.model.dtype != torch.float32 and device.type == "cpu":
            long = BLOCK  # computed by the code that a copy was compared by, at an eighth the speed
        special = {size for name, size in settings if "token" in name}
        plain = torch.tensor([i for i in range(text.vocab_size) if i not in special])
        random = torch.Generator().manual_seed(SEED)
        self._first, self._second, self._other, self._third = (
            plain[torch.randint(len(plain), (min(size, self._positions),), generator=random)]
            for size in (SHORT, long, SHORT, math.ceil((1 - PADDING) * min(long, self._positions)))
        )
        if module is described:
            log.info(
                "%s: its forward pass is compared on sequences of %d and %d tokens; settings of "
                "its reach: %s",
                module.model.name_or_path, len(self._first), len(self._second), reach or "none",
            )  # fmt: skip
        self._sequences = [self._first, self._second]
        if module.way is Way.BESIDE:  # a sequence that lies beside the second, and is filled up
            self._sequences.append(self._third)
        self._own = [self._by_itself(ids) for ids in self._sequences]
        self._row = self._compute(*self._sequences)
        self._rounding = TOLERANCE
        if module.model.dtype != torch.float32:
            with self._embeddings(_in_the_last_place):
                nudged = self._compute(*self._sequences)
            self._rounding = max(TOLERANCE, ROUNDINGS * self._size(nudged - self._row))

    def all(self) -> None:
        """Compare in every respect; raise Unfit with the first difference."""
        self.head()
        self.alone()
        self.independence()
        self.packed()

    @contextmanager
    def _embeddings(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Change embedded tokens [1, n, H] for a while."""
        embedding = self._module.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _, inputs, output: change(output))
        try:
            yield
        finally:
            hook.remove()

    def _by_itself(self, sequence: Tensor, *, longest: int = WRITTEN_OUT) -> Tensor:
        """Return the model's own outputs for a sequence; attention written out up to a length.

        Nothing is compiled.
        """
        model = self._described.model
        plain = plain_attention(model, self._attention, written_out=len(sequence) <= longest)
        with plain, torch.compiler.set_stance("force_eager"):
            return self._described.own(sequence.to(self._device))

    def _compute(self, *sequences: Tensor, last: int | None = None) -> Tensor:
        """Return the first output for a row; the first sequence ends at the position `last`."""
        positions = [torch.arange(len(sequence)) for sequence in sequences]
        if last is not None:
            positions[0][1:] += last - len(sequences[0]) + 1
        columns = torch.cat(sequences), torch.cat(positions)
        return self._run(*(column.to(self._device) for column in columns))[0]

    def head(self) -> None:
        """Compare the form of large logits with what log-probabilities here make of them."""
        if not isinstance(self._module, Policy):
            return
        model = self._described.model
        embedding = model.get_output_embeddings()
        products: list[Tensor] = []

        def enlarge(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            products.append(output.float() * (LARGE_LOGIT / output.float().abs().max()))
            return products[-1]

        hook = embedding.register_forward_hook(enlarge)
        try:
            ids = self._first[None].to(self._device)
            with plain_attention(model, self._attention, written_out=True):
                logits = model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        if products and logits.shape == products[-1].shape:
            expected = bend(products[-1].clone(), self._module.options)
            difference = float((logits - expected).abs().max())
            if difference > 0.01:
                raise Unfit(
                    "it changes its logits after the output embedding otherwise than "
                    f"log-probabilities here do (by up to {difference:.3g} for products of up to "
                    f"{LARGE_LOGIT:g})"
                )

    def alone(self) -> None:
        """Compare sequences alone: with the model's own head and its own attention."""
        for sequence, own in zip(self._sequences, self._own, strict=True):
            computed = self._compute(sequence)
            if not self._agree(computed, own):
                left_out = self._by_itself(sequence, longest=0) - own
                if not self._is_rounding(left_out):
                    raise Unfit(
                        f"attention = {self._attention!r} leaves out a part of its attention, and "
                        f"{self._module.output} differ by up to {float(left_out.abs().max()):.3g}; "
                        'set attention = "eager" or "auto"'
                    )
            self._compare(computed, own, f"a sequence of {len(sequence)} tokens alone")

    def packed(self) -> None:
        """Compare the sequences of one row with each alone."""
        parts = torch.split(self._row, [len(sequence) for sequence in self._sequences])
        count = {2: "two", 3: "three"}[len(parts)]
        for part, own in zip(parts, self._own, strict=True):
            where = f"one of {count} sequences in a row of {len(self._row)} tokens"
            self._compare(part, own, where)

    def _compare(self, computed: Tensor, own: Tensor, where: str) -> None:
        if not self._agree(computed, own):
            differences = computed[len(computed) - len(own) :] - own
            raise Unfit(
                f"{self._module.output} here and by its own forward pass differ by up to "
                f"{float(differences.abs().max()):.3g}, for {where}, with attention = "
                f"{self._attention!r}"
            )

    def _agree(self, computed: Tensor, own: Tensor) -> bool:
        return self._is_rounding(computed[len(computed) - len(own) :] - own)

    def _is_rounding(self, differences: Tensor) -> bool:
        return self._size(differences) <= self._rounding

    def _size(self, differences: Tensor) -> float:
        """Return the largest difference, but in bfloat16 that of medians."""
        sizes = differences.abs()
        if self._module.model.dtype == torch.float32:
            return float(sizes.max())
        return max(float(block.median()) for block in torch.split(sizes, BLOCK))

    def independence(self) -> None:
        """Require that other tokens, at other positions, do not move the second sequence.

        In bfloat16 rounding may hide that they do, and kernels whose shapes follow the routing of
        experts may round otherwise: then the derivative by the first sequence must be 0 too.
        """
        start = len(self._first)
        row = self._compute(self._other, *self._sequences[1:], last=self._positions - 1)
        moved = (row - self._row)[start:]
        rounded = bool(moved.any()) or self._module.model.dtype != torch.float32
        rounded &= self._module.way is Way.PACKED
        if not self._is_rounding(moved) or (rounded and self._derivative().any()):
            size = f"up to {float(moved.abs().max()):.3g}" if moved.any() else "less than rounding"
            raise Unfit(
                f"sequences packed together see each other, or the largest position of their row: "
                f"{self._module.output} of the second move by {size} with the first; "
                "its layers ignore where position_ids restart, as those with a state (linear "
                "attention, convolutions) and with masks of their own do"
            )

    @torch.enable_grad()
    def _derivative(self) -> Tensor:
        """Return the derivative [n, H] of the second sequence's outputs by the first's tokens."""
        embedded: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        with self._embeddings(keep):
            outputs = self._compute(self._first, self._second[:SHORT])
        total = outputs[len(self._first) :].sum()
        (gradient,) = torch.autograd.grad(total, embedded[-1])
        return gradient[0, : len(self._first)]


def _in_the_last_place(output: Tensor) -> Tensor:
    """Move numbers up or down by about one unit in the last place."""
    random = torch.Generator().manual_seed(0)
    up = torch.randint(2, output.shape, generator=random).to(output.device) * 2 - 1
    return (output.double() * (1 + up * torch.finfo(output.dtype).eps)).to(output.dtype)


def _integers(settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and of its sections, with their names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int):
            yield str(name), value
