"""Time and memory of a mixture of eleven datasets with 1.2 million boxes, by hand:

    python tests/test_datasets/large_mixture.py FOLDER

The first call writes the COCO files; no image is read. Seconds are those of the
processor, and memory is resident, of which what processes share is counted in each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

# Images and boxes in the proportions of UODB's training sets.
SIZES = (
    *((500, 1_500), (40_000, 290_000), (27_000, 29_000), (14_000, 190_000)),
    *((5_000, 30_000), (8_000, 10_000), (1_000, 3_300), (12_900, 160_000)),
    *((7_000, 37_000), (16_500, 47_000), (60_000, 402_200)),
)
CLASSES = 20


def write(path: Path, images: int, boxes: int, seed: int) -> None:
    """Write one COCO file, with polygons as the COCO dataset has them."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 400, (boxes, 2)).tolist()
    sides = rng.integers(8, 200, (boxes, 2)).tolist()
    owners = rng.integers(0, images, boxes).tolist()
    kinds = rng.integers(1, CLASSES + 1, boxes).tolist()
    rows = enumerate(zip(corners, sides, owners, kinds, strict=True), start=1)
    annotations = [
        dict(
            id=number,
            image_id=owner,
            category_id=kind,
            bbox=[x, y, w, h],
            area=w * h,
            iscrowd=0,
            segmentation=[[x, y, x + w, y, x + w, y + h, x, y + h] * 3],
        )
        for number, ((x, y), (w, h), owner, kind) in rows
    ]
    records = [
        dict(id=i, file_name=f"folder/image_{i:08}.jpg", width=640, height=640)
        for i in range(images)
    ]
    categories = [dict(id=k, name=f"class {k}") for k in range(1, CLASSES + 1)]
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps(dict(images=records, annotations=annotations, categories=categories))
    )


def memory() -> str:
    """Resident memory of this process, now and at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    now, peak = (int(found[key]) / 2**20 for key in ("VmRSS", "VmHWM"))
    return f"process {os.getpid()}: {now:.2f} GiB, at most {peak:.2f}"


def main(folder: Path) -> None:
    """Write, load, and read with two workers."""
    for number, (images, boxes) in enumerate(SIZES):
        path = folder / f"d{number}" / "train.json"
        if not path.exists():
            write(path, images, boxes, number)
    from mmengine.dataset import worker_init_fn
    from mmengine.registry import init_default_scope
    from torch.utils.data import DataLoader

    import damex.registry  # noqa: F401
    from damex.datasets.label_space import LabelSpace
    from damex.datasets.mixture import MixtureDataset
    from damex.datasets.sampler import MixtureSampler
    from damex.datasets.spec import parse_mixture

    init_default_scope("mmdet")
    entries = [
        dict(name=path.name, data_root=f"{path}/", train="train.json")
        for path in sorted(folder.iterdir())
    ]
    print(f"before: {memory()}")
    started = time.process_time()
    space = LabelSpace.from_specs(parse_mixture(entries)).to_metainfo()
    print(f"label space: {time.process_time() - started:.1f} s")
    pipeline = [
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="PackDetInputs", meta_keys=("img_id",)),
    ]
    mixture = MixtureDataset(datasets=entries, pipeline=pipeline, label_space=space)
    print(f"loaded: {time.process_time() - started:.1f} s, {len(mixture):,} images")
    print(f"parent: {memory()}")
    sampler = MixtureSampler(mixture, seed=0, samples_per_epoch=40_000)

    def collate(samples: list) -> tuple[int, str]:
        return sum(len(s["data_samples"].gt_instances) for s in samples), memory()

    loader = DataLoader(
        mixture,
        batch_size=16,
        sampler=sampler,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=lambda n: worker_init_fn(n, 2, 0, 0),
    )
    found = list(loader)
    print(f"boxes read: {sum(boxes for boxes, _ in found):,}")
    for text in sorted(text for _, text in found[-2:]):
        print(f"worker: {text}")
    print(f"in all: {time.process_time() - started:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
