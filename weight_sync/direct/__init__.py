"""Weight updates without staging, by vLLM's own transfer engines."""
