"""Chen et al. 2022: why a mixture needs nonlinear experts, and what routing learns."""
