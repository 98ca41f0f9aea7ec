"""Runs from Python. The folder `headway` is installed as a package of its own: `import headway`."""
