"""The Ray cluster that a run works on."""
