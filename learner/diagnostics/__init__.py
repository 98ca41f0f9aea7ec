"""Statistics of a trained batch."""
