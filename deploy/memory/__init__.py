"""Memory that a recipe needs, predicted by process and node."""
