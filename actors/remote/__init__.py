"""Agents on other machines: they fetch tasks and report results over HTTP."""
