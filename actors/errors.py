"""Errors of the actors.

ActorsError                  exit code 1
├── InputError               exit code 2: a setting, model, source or reward the user gave is wrong
├── EngineStale              the engine has no weights of any policy version yet
└── EngineDied               a process of the engine is gone, and with it every running request
"""

from typing import ClassVar


class ActorsError(Exception):
    """Root of every error that leaves this package."""

    exit_code: ClassVar[int] = 1


class InputError(ActorsError, ValueError):
    """A setting, model, source or reward that cannot be used; says what would be."""

    exit_code: ClassVar[int] = 2


class EngineStale(ActorsError):
    """The engine was asked to generate before its first policy version."""


class EngineDied(ActorsError):
    """A process of the engine is gone; the engine has to be built again."""
