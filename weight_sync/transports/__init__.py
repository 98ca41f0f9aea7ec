"""Implementations of `weight_sync.transports.protocol.Transport`, one a file."""
