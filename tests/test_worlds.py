"""Worlds of the toy generator: shared kinds, names that conflict or agree."""

from __future__ import annotations

import colorsys
import json

import numpy as np
import pytest
from PIL import Image

from damex.errors import ConfigError, DataError
from damex.toydata import generate_toy_mixture
from damex.toydata.__main__ import main
from damex.toydata.worlds import WORDS, WORLDS, world_specs


@pytest.mark.parametrize("names", ["conflicting", "agreeing"])
def test_worlds_share_kinds_and_words(tmp_path, names):
    specs = world_specs(3, names=names, num_train=40, num_val=2)
    generate_toy_mixture(tmp_path / "worlds", specs=specs)
    words = {}
    for world in specs:
        content = json.loads(
            (tmp_path / "worlds" / world.name / "train.json").read_text()
        )
        by_id = {one["id"]: one["name"] for one in content["categories"]}
        words[world.name] = {by_id[a["category_id"]] for a in content["annotations"]}
        # A kind is known by its colour, which no other kind has.
        found = _word_by_hue(tmp_path / "worlds" / world.name, content, by_id)
        shift = WORLDS.index(world.name) if names == "conflicting" else 0
        for kind, word in found.items():
            assert word == {WORDS[(kind + shift) % 8]}
    assert all(found == set(WORDS) for found in words.values())


def _word_by_hue(folder, content, by_id):
    """The words of boxes whose middle pixel has the hue of a kind without a hole."""
    files = {image["id"]: image["file_name"] for image in content["images"]}
    found = {}
    for one in content["annotations"]:
        x, y, width, height = one["bbox"]
        pixel = np.asarray(Image.open(folder / "images" / files[one["image_id"]]))[
            y + height // 2, x + width // 2
        ]
        hue, saturation, _ = colorsys.rgb_to_hsv(*(pixel / 255))
        kind = round((hue - 1 / 16) * 8)
        is_sure = saturation > 0.75 and abs((hue - 1 / 16) * 8 - kind) < 0.15
        if is_sure and kind in (0, 2, 3, 4, 5):
            found.setdefault(kind, []).append(by_id[one["category_id"]])
    # Some boxes have another object in their middle.
    return {k: {max(set(w), key=w.count)} for k, w in found.items() if len(w) > 3}


def test_worlds_are_told_apart_by_their_names(tmp_path):
    agreeing = world_specs(1, names="agreeing", num_train=1, num_val=1)
    generate_toy_mixture(tmp_path / "out", specs=agreeing)
    with pytest.raises(DataError, match="already holds"):
        generate_toy_mixture(
            tmp_path / "out", specs=world_specs(1, num_train=1, num_val=1)
        )


def test_options_of_worlds_are_for_worlds(tmp_path, capsys):
    out = ["--out", str(tmp_path / "toy")]
    assert main([*out, "--train", "3"]) == 2
    assert "are for --worlds" in capsys.readouterr().err
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(count=9), "1 to 8, got 9"),
        (dict(count=2, names="mixed"), "conflicting"),
        (dict(count=2, num_train=0), "1 or more"),
    ],
)
def test_worlds_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        world_specs(**arguments)
