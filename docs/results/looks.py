"""Print how well datasets, and halves of one, are told apart (split-labels.md)."""

import random
from itertools import combinations
from pathlib import Path

from damex.workbench.check.domains import looks_of, recognized


def main() -> None:
    """Compare the datasets below ``data/seven``, ``data/toy`` and ``data/worlds``."""
    for root in ("data/seven", "data/toy", "data/worlds"):
        files = {
            path.name: sorted((path / "images").glob("*.*"))
            for path in sorted(Path(root).iterdir())
            if (path / "train.json").is_file()
        }
        looks = {name: looks_of(some) for name, some in files.items()}
        pairs = combinations(looks, 2)
        closest = min((recognized(looks[a], looks[b]), a, b) for a, b in pairs)
        halves = []
        for some in files.values():
            for seed in range(5):
                order = random.Random(seed).sample(some, len(some))
                half = len(order) // 2
                halves.append(
                    recognized(looks_of(order[:half]), looks_of(order[half:]))
                )
        print(root, "closest pair:", closest, "halves, most:", max(halves))


if __name__ == "__main__":
    main()
