"""The engine that trains the weights, and its checkpoints."""
