"""DAMEX (Jain et al., NeurIPS 2023, arXiv 2311.04894) on tokens."""
