"""Using a checkpoint: predictions, exports and reports.

::

    from damex.inference import Predictor
    predictor = Predictor("epoch_3.pth")
    predictions = predictor(["photo.jpg"])
"""

import damex.registry  # noqa: F401  (first: it keeps mmdet's import silent)
from damex.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
