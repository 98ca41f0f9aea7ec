"""Commands that work beside a run: warm start, reward models, replay, export, trial episodes."""
