"""The command `headway`."""

from deploy.cli.app import main

__all__ = ["main"]
