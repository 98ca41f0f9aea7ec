"""Terminal output and signals of every command."""
