"""Weight updates inside vLLM's worker process."""
