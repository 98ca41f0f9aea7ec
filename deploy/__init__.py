"""The wiring of a run and its command line; may import every package, and none imports it."""
