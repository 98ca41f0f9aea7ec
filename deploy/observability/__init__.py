"""Metrics, the watchdog, trackers, and live views of a run."""
