"""Mixtures of detection datasets: one label space, one sampler, checked files."""
