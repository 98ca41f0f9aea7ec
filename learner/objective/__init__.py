"""The training objective of a packed row: policy loss, corrections, KL, entropy and value loss."""
