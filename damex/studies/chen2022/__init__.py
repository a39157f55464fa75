"""Chen et al. 2022: why a mixture needs nonlinear experts, and what routing learns."""

from damex.studies.chen2022.study import run

__all__ = ["run"]
