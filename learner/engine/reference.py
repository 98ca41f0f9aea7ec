"""Frozen models that score what the policy sampled: its reference, and teachers.

The KL penalty and DPO compare with the reference, and distillation with teachers.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.engine.model_folder import write_files, write_weights
from learner.engine.tensor_parts import Part, PartReader, write_parts
from learner.model.forward_check import check_forward
from learner.model.host_copy import HostCopy
from learner.model.policy import Policy

REFERENCE_FOLDER = "reference"
REMAINDERS = "remainders"
"""Subfolder of the reference's, and prefix of names, for what bfloat16 rounds off its weights."""


class Reference:
    """A frozen policy, which `refresh` moves towards the one that is trained."""

    def __init__(
        self,
        policy: Policy,
        *,
        device: torch.device,
        origin: str,
        saved: Path | None = None,
        shared: Callable[[Policy], Callable[..., tuple[Tensor, ...]]] | None = None,
    ) -> None:
        """Freeze the policy, and move it to the device or have it `shared` by the ranks.

        `origin` is the folder or hub name of the model that it was at first; `saved` the folder
        that `capture` wrote and it was loaded from, if any.

        Raises:
            InputError: It cannot be computed, or the folder is damaged.
        """
        self._policy = policy.requires_grad_(requires_grad=False)
        self._run = self._policy.to(device) if shared is None else shared(self._policy)
        self._device, self._origin = device, origin
        self._refreshed = saved is not None
        self._remainders: dict[str, Tensor] = {}
        """By weight in bfloat16 that moves in part: see `remainder_of`."""
        self._copies = HostCopy()
        check_forward(self._policy, self._run, device=device)  # before its remainders
        if saved is not None and (saved / REMAINDERS).is_dir():
            self._restore(PartReader(saved / REMAINDERS))

    def _restore(self, reader: PartReader) -> None:
        own = dict(self._policy.model.named_parameters())
        for name in reader.names:
            weight = own[name]
            remainder = reader.read(name, 0, weight.numel()).view_as(weight).to(self._device)
            if weight.dtype == torch.bfloat16:
                self._remainders[name] = remainder
            else:  # the run has gone on in another dtype
                weight.data = exact_value(weight, remainder)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the log-probabilities [N] float32 of packed tokens; see `Policy.forward`."""
        columns = (token_ids, position_ids, wanted)
        outputs: tuple[Tensor, ...] = self._run(*(column.to(self._device) for column in columns))
        return outputs[0]

    @torch.no_grad()
    def refresh(self, weights: Iterator[tuple[str, Tensor]], mix: float) -> None:
        """Replace the weights by mix · weights + (1 − mix) · their own values, mix in (0, 1].

        TR-DPO (arXiv 2404.09656, §3): hard at mix = 1, soft below, where values are float32 and it
        computes with them rounded to its dtype. `weights` are those of the policy, in full, by
        their names in it.
        """
        own = dict(self._policy.model.named_parameters())
        for name, tensor in weights:
            weight, remainder = own[name], self._remainders.pop(name, None)
            exact = weight.float() if remainder is None else exact_value(weight, remainder)
            weight.copy_(exact.lerp_(tensor.to(exact), mix))
            if mix < 1 and weight.dtype == torch.bfloat16:
                self._remainders[name] = remainder_of(exact, weight)
        self._refreshed = True

    def capture(self) -> Callable[[Path], None] | None:
        """Copy the weights to host memory if they differ from the model folder's; for one rank.

        Returns a function that writes them to a folder in any thread; None if they do not differ.
        """
        if not self._refreshed:
            return None
        model = self._policy.model
        weights = dict(model.named_parameters())
        rest = {f"{REMAINDERS}/{name}": tensor for name, tensor in self._remainders.items()}
        copies = self._copies.begin([*weights.items(), *rest.items()]).result()

        def write(folder: Path) -> None:
            own = folder / REFERENCE_FOLDER
            write_files(model, self._origin, own)
            write_weights(model, ((name, copies[name]) for name in weights), own)
            if rest:
                parts = (Part(name.split("/")[1], 0, copies[name].flatten()) for name in rest)
                write_parts(own / REMAINDERS, parts, rank=0, ranks=1)

        return write


class Teacher(Reference):
    """A frozen model that tells its likeliest words, or how likely it finds what was sampled."""

    def __init__(self, policy: Policy, *, top_k: int, words: int, **how: Any) -> None:
        """Freeze the policy; `how` are keywords of `Reference`.

        It tells `top_k` of the first `words` of its vocabulary; 0: the sampled token alone.
        """
        super().__init__(policy, **how)
        self.columns = ("teacher_logprobs", "teacher_words")[: 2 if top_k else 1]
        """Names of what `scores` returns."""
        self.told = min(top_k, words) or 1
        """Words of each token, K."""
        if top_k:
            policy.likeliest = top_k, words

    @torch.no_grad()
    def scores(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return log-probabilities and the words that they are of, [·, N, K] float32."""
        columns = (token_ids, position_ids, wanted)
        outputs = self._run(*(column.to(self._device) for column in columns))
        told = [column.view(len(token_ids), -1).float() for column in outputs]
        return torch.stack(told[: len(self.columns)])


def remainder_of(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return what rounding to bfloat16 took from float32 values, in steps of their last bit, int16.

    At an exact tie, one step is lost.
    """
    steps = exact.view(torch.int32) - rounded.float().view(torch.int32)
    return steps.clamp_(max=torch.iinfo(torch.int16).max).short()


def exact_value(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values that were rounded, by what `remainder_of` returned of them."""
    return (rounded.float().view(torch.int32) + remainder).view(torch.float32)
