"""Mends the files of a run, finds what it goes on from, and salvages what is whole."""
