"""Convergence rates of softmax gating (Nguyen, Ho, Rinaldo 2025, arXiv 2503.03213)."""
