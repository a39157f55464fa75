"""Missing labels (Yao et al. 2020, arXiv 2001.04621), on two drawn datasets."""
