"""pMoE: patch-level routing needs fewer samples (Chowdhury et al., ICML 2023)."""
