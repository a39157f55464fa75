"""A config that trains in seconds."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path, two_datasets):
    """The shipped tiny detector on two datasets, 8 samples."""
    path = tmp_path / "config.py"
    bases = [
        f"{ROOT}/configs/_base_/{name}.py"
        for name in (
            "models/moe-dino_tiny",
            "moe/damex",
            "datasets/toy",
            "schedules/adamw_tiny",
            "runtime",
        )
    ]
    path.write_text(
        f"_base_ = {bases!r}\n"
        f"mixture = {[dict(entry) for entry in two_datasets]!r}\n"
        "train_dataloader = dict(\n"
        "    batch_size=2, num_workers=0,\n"
        "    sampler=dict(samples_per_epoch=8),\n"
        ")\n"
        "train_cfg = dict(max_epochs=1, val_interval=1)\n"
    )
    return path
