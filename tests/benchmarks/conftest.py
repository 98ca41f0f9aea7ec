"""Fixtures of the tests of benchmarks: commands in a folder with a warm start."""

from tests.deploy.conftest import headway

__all__ = ["headway"]
