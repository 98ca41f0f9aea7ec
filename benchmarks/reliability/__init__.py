"""Benchmarks that kill processes."""
