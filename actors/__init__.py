"""Rollouts: prompt sources, engines, environments, rewards, and the worker that joins them.

Importing the package, or `actors.config`, loads no engine, tokenizer or task library.
"""
