"""Print the time per image and the weights of trained detectors (seven-datasets.md)."""

import statistics
import time
from pathlib import Path

import torch
from PIL import Image

import damex


def main() -> None:
    """Time detectors of ``work_dirs/seven`` in turns, an image at a time."""
    torch.set_num_threads(1)
    arms = ("dense", "single_microcontrollers", "single_aquarium")
    detectors = {a: damex.load(f"work_dirs/seven/{a}/seed1/epoch_2.pth") for a in arms}
    seconds = {arm: [] for arm in arms}
    for name in ("microcontrollers", "aquarium"):
        for path in sorted(Path(f"data/seven/{name}/images").glob("*"))[:20]:
            image = Image.open(path).convert("RGB")
            for arm, detector in detectors.items():  # in turns
                started = time.perf_counter()
                list(detector.predict([image]))
                seconds[arm].append(time.perf_counter() - started)
    for arm, some in seconds.items():
        weights = torch.load(
            f"work_dirs/seven/{arm}/seed1/epoch_2.pth", weights_only=False
        )["state_dict"]
        megabytes = sum(one.nbytes for one in weights.values()) / 1e6
        print(arm, f"{1000 * statistics.median(some):.0f} ms, {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
