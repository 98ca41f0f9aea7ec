"""Environments, the partners of the policy, by name or dotted path."""
