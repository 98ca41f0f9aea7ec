"""The driver of a run: it creates the processes, follows them and ends the run."""
