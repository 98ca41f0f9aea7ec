"""The gateway through which agents that are programs of their own speak to the policy."""
