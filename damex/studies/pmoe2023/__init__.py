"""pMoE: patch-level routing needs fewer samples (Chowdhury et al., ICML 2023).

``python tools/study.py pmoe2023`` takes about 25 minutes on one core. Digits come
from scikit-learn; where MNIST's four idx files lie in ``data/mnist``, the full study
takes those, as the paper did. The quick one always takes scikit-learn's.
"""

from damex.studies.pmoe2023.study import run

__all__ = ["run"]
