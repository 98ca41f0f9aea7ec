"""Runs untrusted programs, isolated from everything but their own input and output."""

from actors.sandbox.sandbox import (
    Outcome,
    Sandbox,
    check_code_execution,
    check_compute_sandbox,
    check_sandbox,
)

__all__ = ["Outcome", "Sandbox", "check_code_execution", "check_compute_sandbox", "check_sandbox"]
