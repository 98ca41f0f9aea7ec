"""Importance weights for the difference of proximal and behaviour policy, and rejections.

Weights are detached and multiply the policy loss per token, after its clip and before aggregation;
never a KL, entropy or value term. Bounds are on proximal / behaviour. Denominators stay those of
all tokens: rejected tokens count as 0.
"""

from learner.corrections.importance_weights import Correction, correction, importance_weights

__all__ = ["Correction", "correction", "importance_weights"]
