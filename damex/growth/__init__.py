"""Datasets put into a trained detector, and taken away from it."""
