"""Print the time per image and the size of detectors: ``cost.py FILE [FILE ...]``.

A file is a checkpoint, or the ``.onnx`` file of ``damex export``. A checkpoint with
``@320`` looks through windows of 320 pixels. All take turns, an image at a time, on one
thread; decoding of images is excluded.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import damex


def main(files: list[str]) -> None:
    """Time detectors on 40 images of ``data/seven``."""
    torch.set_num_threads(1)
    detectors = {file: runner(file) for file in files}
    seconds: dict[str, list[float]] = {file: [] for file in files}
    for name in ("microcontrollers", "aquarium"):
        for path in sorted(Path(f"data/seven/{name}/images").glob("*"))[:20]:
            image = Image.open(path).convert("RGB")
            for file, detect in detectors.items():
                started = time.perf_counter()
                detect(image)
                seconds[file].append(time.perf_counter() - started)
    for file, some in seconds.items():
        milliseconds = 1000 * statistics.median(some)
        print(f"{file}: {milliseconds:.0f} ms, {megabytes(file):.1f} MB")


def runner(file: str) -> Callable[[Image.Image], object]:
    """The detector of a file, called with one RGB image."""
    if not file.endswith(".onnx"):
        file, _, side = file.partition("@")
        detector, tile = damex.load(file), int(side) if side else None
        return lambda image: list(detector.predict([image], tile=tile))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options)
    return lambda image: session.run(None, {"images": np.asarray(image)[None]})


def megabytes(file: str) -> float:
    """The weights of a checkpoint without its optimizer, or the whole ``.onnx``."""
    if file.endswith(".onnx"):
        return Path(file).stat().st_size / 1e6
    file = file.partition("@")[0]
    weights = torch.load(file, map_location="cpu", weights_only=False)["state_dict"]
    return sum(one.nbytes for one in weights.values()) / 1e6


if __name__ == "__main__":
    main(sys.argv[1:])
