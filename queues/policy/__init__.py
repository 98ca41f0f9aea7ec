"""Rules of which groups may start, train or be issued again. Pure functions."""
