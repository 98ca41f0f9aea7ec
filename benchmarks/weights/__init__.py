"""Benchmarks of weight updates."""
