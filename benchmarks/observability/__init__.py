"""Benchmarks and pictures of metrics and reports."""
