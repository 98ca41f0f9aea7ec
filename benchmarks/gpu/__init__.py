"""One GPU: see README.md here."""
