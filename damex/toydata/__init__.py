"""The toy mixture: five small detection datasets, generated in seconds.

For trying and testing training on several datasets at once: no download, about 6 MB,
128 px, and a tiny DETR learns a part of it in minutes on a CPU.

    python -m damex.toydata --out data/toy

| dataset  | train/val | appearance                               | classes           |
|----------|-----------|------------------------------------------|-------------------|
| shapes   | 900/60    | flat shapes on noisy pastel fades        | star, square, ... |
| digits   | 500/60    | handwritten digits (real) on ruled paper | zero ... nine     |
| photos   | 250/60    | stickers on printed photographs (real)   | leaf, circle, ... |
| playroom | 120/60    | toys on a wooden floor                   | ball, crate, ...  |
| arcade   | 60/60     | a dark screen with a grid                | coin, chip, ...   |

Like real mixtures, datasets differ in looks and size, names overlap under different
ids, and `playroom` and `arcade` draw three objects alike and name them differently.
data/README.md explains the choices. Difficulty was set by short trainings of the quick
start; no choice compared methods.
"""

from __future__ import annotations

from damex.toydata.domains import DATASETS
from damex.toydata.generate import ToyReport, contact_sheet, generate_toy_mixture

__all__ = ["DATASETS", "ToyReport", "contact_sheet", "generate_toy_mixture"]
