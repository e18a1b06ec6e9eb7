"""Accuracy and speed, measured; imported by nothing."""
