"""Rejection by the lag of each token. Caps by lag are `tis` with `lag_caps`."""

from learner.corrections.registry import Correction, built_in_correction, unweighted
from learner.errors import InputError
from learner.losses.loss_inputs import LossInputs


@built_in_correction("lag_mask")
def lag_mask(inputs: LossInputs, *, max_lag: int) -> Correction:
    """Reject tokens whose lag is larger than `max_lag`, perhaps only the oldest of a rollout.

    Stats count tokens: `too_old`.
    """
    if max_lag < 0:
        raise InputError(f"lag_mask needs max_lag >= 0, found {max_lag}")
    rejected = inputs.trained & (inputs.lags("lag_mask") > max_lag)
    return Correction(unweighted(inputs), ~rejected, {"too_old": rejected.sum()})
