"""The training objective: policy loss, corrections, KL, entropy and value loss."""
