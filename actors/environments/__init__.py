"""What a policy talks to: environments, found by name or dotted path in `environment`."""
