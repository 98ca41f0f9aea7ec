"""The state of a run in the broker's memory."""
