"""Policies, critics and reference models: loading, packing and log-probabilities."""
