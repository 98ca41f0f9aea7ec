"""The reference policy: frozen weights that the KL penalty and DPO compare with.

Every rank holds all of it. Leaves out when it is refreshed (`update`).
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from learner.disk_wait import write_whole
from learner.model.policy import Policy

REFERENCE_FOLDER = "reference"


class Reference:
    """A frozen policy that may be moved towards the one that is trained."""

    def __init__(self, policy: Policy, *, device: torch.device, refreshed: bool = False) -> None:
        """Freezes the policy.

        Args:
            policy: Its weights are the reference; it is moved to the device.
            device: Where rows are computed.
            refreshed: Its weights are not those of the model folder any more.
        """
        self._policy = policy.to(device).requires_grad_(requires_grad=False)
        self._device = device
        self._refreshed = refreshed

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Log-probabilities [N] float32 of the tokens of a row; see `model.Policy`."""
        columns = (token_ids, position_ids, wanted)
        said: tuple[Tensor, ...] = self._policy(*(each.to(self._device) for each in columns))
        return said[0]

    @torch.no_grad()
    def refresh(self, weights: Iterator[tuple[str, Tensor]], mix: float) -> None:
        """Becomes mix · weights + (1 − mix) · itself.

        TR-DPO (arXiv 2404.09656, §3): hard at mix = 1, soft below.

        Args:
            weights: Of the policy, in full, by the names of its model folder.
            mix: In (0, 1].
        """
        own = dict(self._policy.model.named_parameters())
        for name, tensor in weights:
            own[name].lerp_(tensor.to(own[name]), mix)
        self._refreshed = True

    def save(self, folder: Path) -> None:
        """Writes what cannot be loaded from a model folder any more. By one rank."""
        if self._refreshed:
            own = folder / REFERENCE_FOLDER
            own.mkdir(parents=True, exist_ok=True)
            write_whole(own, lambda: self._policy.model.save_pretrained(own))
