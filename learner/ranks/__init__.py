"""The processes of the learner."""
