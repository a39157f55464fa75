"""DeepMoE (Wang et al., UAI 2019, arXiv 1806.01531) on small digits."""
