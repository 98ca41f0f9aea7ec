"""Runs untrusted programs, isolated from everything but their own input and output."""
