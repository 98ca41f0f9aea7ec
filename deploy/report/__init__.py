"""Figures, tables and pictures of finished runs."""
