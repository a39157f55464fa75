"""Metrics per dataset, in one pass over the data."""
