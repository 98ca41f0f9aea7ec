"""Implementations of `weight_sync.transport.Transport`, one a file."""
