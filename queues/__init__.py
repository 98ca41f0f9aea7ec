"""The queues between actors and learner: bounded staleness, durable delivery, exact accounts."""
