"""What every command needs of the terminal, signals and threads."""
