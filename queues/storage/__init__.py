"""The ledger and the journal on disk."""
