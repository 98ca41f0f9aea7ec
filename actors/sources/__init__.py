"""Where prompts come from: one source a file, found by name or dotted path in `source`."""
