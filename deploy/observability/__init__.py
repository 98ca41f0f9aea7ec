"""Metrics, traces of stalls, trackers, and views of a live run."""
