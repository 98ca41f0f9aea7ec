"""The reference policy: frozen weights that the KL penalty and DPO compare with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from learner.disk_wait import make_folder, write_whole
from learner.model.forward_check import check_forward
from learner.model.host_copy import HostCopy
from learner.model.policy import Policy

REFERENCE_FOLDER = "reference"


class Reference:
    """A frozen policy, which `refresh` moves towards the one that is trained."""

    def __init__(
        self,
        policy: Policy,
        *,
        device: torch.device,
        refreshed: bool = False,
        shared: Callable[[Policy], Callable[..., tuple[Tensor, ...]]] | None = None,
    ) -> None:
        """Freeze the policy, and move it to the device or have it `shared` by the ranks.

        `refreshed`: its weights are no longer those of the model folder.
        """
        self._policy = policy.requires_grad_(requires_grad=False)
        self._run = self._policy.to(device) if shared is None else shared(self._policy)
        self._device = device
        self._refreshed = refreshed
        self._copies = HostCopy()
        check_forward(self._policy, self._run, device=device)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the log-probabilities [N] float32 of packed tokens; see `Policy.forward`."""
        columns = (token_ids, position_ids, wanted)
        outputs: tuple[Tensor, ...] = self._run(*(column.to(self._device) for column in columns))
        return outputs[0]

    @torch.no_grad()
    def refresh(self, weights: Iterator[tuple[str, Tensor]], mix: float) -> None:
        """Replace the weights by mix · weights + (1 − mix) · their own values, mix in (0, 1].

        TR-DPO (arXiv 2404.09656, §3): hard at mix = 1, soft below. `weights` are those of the
        policy, in full, by the names of its model folder.
        """
        own = dict(self._policy.model.named_parameters())
        for name, tensor in weights:
            own[name].lerp_(tensor.to(own[name]), mix)
        self._refreshed = True

    def capture(self) -> Callable[[Path], None] | None:
        """Copy the weights to host memory if they differ from the model folder's; for one rank.

        Returns a function that writes them to a folder in any thread; None if they do not differ.
        """
        if not self._refreshed:
            return None
        model = self._policy.model
        copies = self._copies.begin(model.state_dict().items()).result()

        def write(folder: Path) -> None:
            own = folder / REFERENCE_FOLDER
            make_folder(own)
            # transformers empties the mapping that it is given
            write_whole(own, lambda: model.save_pretrained(own, state_dict=dict(copies)))

        return write
