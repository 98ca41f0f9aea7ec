"""Prediction of a recipe's throughput and lag."""
