"""Read-only views of a run's ledger and journal."""
