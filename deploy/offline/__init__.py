"""Commands that work without a live run: warm start, reward models, replay, export, trial."""
