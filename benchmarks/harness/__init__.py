"""The frame of every benchmark."""
