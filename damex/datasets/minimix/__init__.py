"""minimix: a mixture of five small detection datasets, generated in seconds.

It is there to try and to test training on several datasets at once: no download,
about 6 MB, 128 px, and a tiny DETR learns a part of it in minutes on a CPU.

    python -m damex.datasets.minimix --out data/minimix

| dataset  | train/val | what it looks like                       | classes           |
|----------|-----------|------------------------------------------|-------------------|
| shapes   | 900/60    | flat shapes on noisy pastel fades        | star, square, ... |
| digits   | 500/60    | handwritten digits (real) on ruled paper | zero ... nine     |
| photos   | 250/60    | stickers on printed photographs (real)   | leaf, circle, ... |
| playroom | 120/60    | toys on a wooden floor                   | ball, crate, ...  |
| arcade   | 60/60     | a dark screen with a grid                | coin, chip, ...   |

What was chosen, and why. Each point is a trait of real mixtures. Difficulty was set by
short trainings of the quick start, with and without experts; no choice compared
methods.

- Each dataset has its own palette, background and noise: parts of an image can tell
  which dataset it is from.
- Sizes are uneven by 15 to 1, validation sets are equal.
- `circle`, `star` and `car` are classes of two datasets each. Circle and star look
  alike in both; so does the car, but what surrounds it differs.
- `playroom` and `arcade` draw three objects from one distribution and name them
  differently: ball and coin, crate and chip, roof and ship (see `tokens`). Only the
  surroundings tell which name is right.
- Image, annotation and category ids start at 1 in every dataset and so collide; the
  same name has another id elsewhere, and no category list is in alphabetical order.
- Objects are about 20 to 60 px long, may hide up to 40 % of an earlier one, and
  lie among distractors without a box; some hardly differ from what is behind them.
- Boxes are tight around the visible pixels. Train and val share no handwritten
  digit and no column of a photograph.
"""

from __future__ import annotations

from damex.datasets.minimix.generate import generate_minimix
from damex.datasets.minimix.mixture import DATASETS
from damex.datasets.minimix.report import DatasetReport, MinimixReport
from damex.datasets.minimix.sheet import contact_sheet

__all__ = [
    "DATASETS",
    "DatasetReport",
    "MinimixReport",
    "contact_sheet",
    "generate_minimix",
]
