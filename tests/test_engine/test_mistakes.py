"""What users get wrong, as they type it: each ends in one line, and harms nothing.

The tables are the repeatable record of mistakes that once ended in a traceback, in a
hang, or in a wrong result.
"""

import pytest
import torch
from mmdet.visualization import DetLocalVisualizer
from mmengine.logging import MMLogger
from PIL import Image

from damex.__main__ import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory, make_coco_dataset, write_config_to):
    """A folder of a user: two datasets, a config, a checkpoint of it, and photos."""
    folder = tmp_path_factory.mktemp("world")
    mixture = [
        make_coco_dataset(folder / "street", classes=["car", "bus"], num_images=4),
        make_coco_dataset(folder / "park", classes=["dog", "car"], num_images=4),
    ]
    for name, extra in {"config": "", "no_mixture": "\nmixture = None"}.items():
        extra = f"train_cfg = dict(max_epochs=1){extra}"
        write_config_to(folder, mixture=mixture, extra=extra, name=name)
    (folder / "photos").mkdir()
    for name in ("1.png", "2.png"):
        Image.effect_noise((64, 48), 99).save(folder / "photos" / name)
    (folder / "note.txt").write_text("not a checkpoint")
    (folder / "folder").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "config.py"]) == 0
    return folder


@pytest.fixture
def typed(world, monkeypatch, capfd):
    """Type a command in the user's folder: its exit status, and both outputs."""

    def run(words):
        # Each command has a process of its own: no log, no picture of an earlier one.
        for kind in (MMLogger, DetLocalVisualizer):
            kind._instance_dict.clear()
        monkeypatch.chdir(world)
        capfd.readouterr()
        status = main(words.format(here=world).split())
        return status, *capfd.readouterr()

    return run


# What is typed, and what the line has to name.
COMMANDS = {
    "train": ("CONFIG",),
    "train none.py": ("none.py", "no config file"),
    "train no_mixture.py": ("mixture",),
    "train config.py --work-dir new --cfg-options max_epochs=0": ("max_epochs", "0"),
    "train config.py --work-dir note.txt": ("note.txt",),
    "train config.py --resume --work-dir new": ("--resume", "new"),
    "train config.py --resume note.txt": ("note.txt",),
    "test config.py folder": ("folder",),
    "test config.py note.txt": ("note.txt",),
    "test config.py work/epoch_1.pth --show-dir {here}/note.txt": ("note.txt",),
    "predict note.txt photos": ("note.txt",),
    "predict folder photos": ("folder",),
    "predict work/epoch_1.pth none": ("none",),
    "predict work/epoch_1.pth photos --batch-size 0": ("--batch-size", "0"),
    "predict work/epoch_1.pth photos --dataset streat": ("did you mean 'street'",),
    "predict work/epoch_1.pth photos --draw photos": ("--draw", "photos"),
    "predict work/epoch_1.pth photos --draw note.txt": ("note.txt",),
    "predict work/epoch_1.pth photos --json folder": ("folder",),
    "predict work/epoch_1.pth photos --device tpu": ("tpu",),
    "export work/epoch_1.pth --out car.pth": ("--dataset",),
    "export work/epoch_1.pth --dataset street --out folder/x.zip": (".zip",),
    "grow work/epoch_1.pth none.py --out new.pth": ("none.py",),
    "prune work/epoch_1.pth --drop lake --out new.pth": ("lake",),
    "data check config.py --json folder": ("folder",),
    "data check none": ("none",),
    "data convert street --out /proc/x": ("/proc/x",),
    "fly": ('"fly"',),
}


@pytest.mark.parametrize("words", COMMANDS)
def test_commands(words, typed, world):
    before = contents_of(world)
    status, _, errors = typed(words)
    assert status == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in COMMANDS[words]), line
    assert contents_of(world) == before  # nothing new, nothing lost


def contents_of(folder):
    """Bytes by file; the log of a training is open as long as this process runs."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file: file.read_bytes() for file in files if file.suffix != ".log"}


def test_the_same_words_without_a_mistake_work(typed, world):
    """Else the rows above could fail for another reason than the one that they name."""
    status, screen, _ = typed("predict work/epoch_1.pth photos --draw drawn")
    assert status == 0
    assert "2 images" in screen
    assert {path.name for path in (world / "drawn").iterdir()} == {"1.png", "2.png"}
    assert typed("data check config.py")[0] in (0, 1)
    assert torch.load(world / "work" / "epoch_1.pth", weights_only=False)
