"""Study of DAMEX (Jain et al., NeurIPS 2023, arXiv 2311.04894) on tokens."""

from damex.studies.damex2023.study import run

__all__ = ["run"]
