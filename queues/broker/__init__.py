"""The broker: both queues of a run behind one object."""
