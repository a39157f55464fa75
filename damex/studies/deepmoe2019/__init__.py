"""Study of DeepMoE (Wang et al., UAI 2019, arXiv 1806.01531) on small digits."""

from damex.studies.deepmoe2019.study import run

__all__ = ["run"]
