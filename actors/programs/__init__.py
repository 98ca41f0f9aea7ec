"""Agents: programs and functions that speak to the policy through the gateway of their actor."""
