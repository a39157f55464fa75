"""A folder of ``damex card`` is its checkpoint, and says what it is."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from safetensors import safe_open
from safetensors.torch import load_file

import damex
from damex.__main__ import main
from damex.engine.model_folder import read_model_folder, write_model_folder
from damex.errors import ConfigError, DataError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.inference.trust import read_literals
from damex.workbench.card import plain
from tests.test_inference.conftest import SPACE

AP = dict(
    mean_ap=0.25,
    mean_ap50=0.5,
    pooled_ap=0.125,
    pooled_ap50=0.375,
    datasets={
        "street": dict(ap=0.512, ap50=0.75, images=7, boxes=9),
        "park": dict(ap=None, ap50=None, images=11, boxes=0),
    },
)


def card(checkpoint, out, *words):
    assert main(["card", str(checkpoint), "--out", str(out), *words]) == 0
    return Path(out)


def edited(path, **meta):
    """The checkpoint with other metadata."""
    content = torch.load(path, weights_only=False)
    content["meta"].update(meta)
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("made", "dataset"), [({}, "auto"), ({}, "park"), (dict(moe=False), "all")]
)
def test_a_folder_detects_to_the_bit_what_its_checkpoint_does(
    save, photos, tmp_path, made, dataset
):
    checkpoint = save(**made)
    folder = card(checkpoint, tmp_path / "folder")
    images = sorted(photos.rglob("*.*g"))
    asked = dict(dataset=dataset, min_score=0.0)
    both = [
        Predictor(path, device="cpu")(images, **asked) for path in (checkpoint, folder)
    ]
    for one, other in zip(*both, strict=True):
        assert len(one.scores) > 0
        for name in ("boxes", "scores", "labels"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.probabilities == other.probabilities
        assert (one.names, one.dataset) == (other.names, other.dataset)


def test_config_and_weights_read_back_as_they_were(save, tmp_path):
    checkpoint = edited(save(), epoch=3, iter=20, seed=5, moe=dict(k=(1, 2)))
    before = DetectorCheckpoint.read(str(checkpoint))
    folder = card(checkpoint, tmp_path / "folder")
    after = DetectorCheckpoint.read(str(folder))
    assert after.pipeline == before.pipeline  # with the tuple of its Resize
    assert after.pipeline[1]["scale"] == (96, 64)
    assert after.model == before.model
    assert after.space == before.space
    kept = {key: after.meta[key] for key in ("epoch", "iter", "seed", "moe")}
    assert kept == dict(epoch=3, iter=20, seed=5, moe=dict(k=(1, 2)))
    assert after.state.keys() == before.state.keys()
    for key, tensor in before.state.items():
        assert tensor.dtype == after.state[key].dtype
        assert torch.equal(tensor, after.state[key])
    again = card(folder, tmp_path / "again")
    assert (again / "config.json").read_text() == (folder / "config.json").read_text()


VALUES = {
    "texts": ["", "ä\u2028\n'\"{{$HOME}}", "\\u0041"],
    "numbers": [0, -1, 2**70, 1e-05, 0.1, -0.0, 1e308, True, None],
    "tuples": ((), (1,), [(1333, 800), [2, (3, [4])]], {"a b": ({},)}),
}


def test_any_plain_config_goes_round(tmp_path):
    space = SPACE.to_metainfo()
    state = dict(weight=torch.zeros(1))
    write_model_folder(tmp_path, state, config=VALUES, label_space=space)
    meta = read_model_folder(tmp_path)["meta"]
    assert repr(read_literals(meta["cfg"], where="")) == repr(VALUES)
    assert meta["dataset_meta"] == space


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("inf"), "config.model.x[1]=inf is"),
        (float("nan"), "config.model.x[1]=nan is"),
        (b"raw", "config.model.x[1]=b'raw' is"),
        ({1: 2}, "the key 1 in config.model.x[1] is"),
        ({"tuple": []}, "the key 'tuple' in config.model.x[1] is"),
        (np.float32(1), "config.model.x[1]=np.float32(1.0) is"),
    ],
)
def test_what_is_not_json_is_refused_by_its_place(tmp_path, value, words):
    config = dict(model=dict(x=[0, value]))
    with pytest.raises(ConfigError, match=re.escape(words)):
        write_model_folder(tmp_path, {}, config=config, label_space=SPACE.to_metainfo())
    assert list(tmp_path.iterdir()) == []


def test_weights_that_share_memory_are_written_whole(tmp_path):
    whole_23 = torch.arange(6.0).reshape(2, 3)
    state = dict(a=whole_23, tied=whole_23, row=whole_23[1], turned=whole_23.T)
    state |= dict(count=torch.tensor(7), none=torch.zeros(0, 4))
    write_model_folder(tmp_path, state, config={}, label_space=SPACE.to_metainfo())
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == dict(format="pt", damex=damex.__version__)
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1  # who may read one may read both


def test_only_tensors_are_weights(tmp_path):
    with pytest.raises(ConfigError, match="extra in the weights is of type dict"):
        write_model_folder(
            tmp_path, dict(extra={}), config={}, label_space=SPACE.to_metainfo()
        )


def test_the_lines_without_damex_run(save, tmp_path, run_python):
    folder = card(save(), tmp_path / "folder")
    blocks = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S
    )
    (lines,) = [block for block in blocks if "safetensors" in block]
    assert "damex" not in lines
    done = run_python("-c", lines, cwd=folder)
    assert done.stdout.startswith("4 classes, such as car\n")
    assert len(done.stdout.splitlines()) == 1 + len(
        load_file(folder / "model.safetensors")
    )


def readme_of(checkpoint, out, *words):
    return (card(checkpoint, out, *words) / "README.md").read_text("utf-8")


def test_scores_are_those_of_the_run_at_this_iteration(save, tmp_path):
    checkpoint = edited(save(), iter=20, epoch=3, seed=5)
    run = dict(AP, iterations=20, device="Tesla `T4`", versions=dict(torch="2.9"))
    run["command"] = "/home/me/damex/__main__.py train x.py\n```\n--amp"
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(run))
    (tmp_path / "detections.png").write_bytes(b"picture")
    text = readme_of(checkpoint, tmp_path / "with")
    assert (tmp_path / "with/detections.png").read_bytes() == b"picture"
    for line in (
        "![Annotated and detected objects](detections.png)",
        "| street | not given | 7 | 2 |",
        "| park | not given | 11 | 2 |",
        "| sky | not given | not given | 1 |",
        "| street | 0.512 | 0.750 |",
        "| park | - | - |",
        "| *mean* | 0.250 | 0.500 |",
        "| *pooled* | 0.125 | 0.375 |",
        "- seed: 5",
        "- epochs: 3",
        "- device: Tesla \\`T4\\`",
        "- versions: torch 2.9",
        "    damex train x.py ``` --amp",
    ):
        assert line in text.splitlines()
    edited(checkpoint, iter=10)
    text = readme_of(checkpoint, tmp_path / "without")
    assert "0.512" not in text
    assert "iteration 20, and these are the weights of iteration 10." in text
    assert "- versions: torch 2.9" in text
    assert "detections.png" not in text
    assert not (tmp_path / "without/detections.png").exists()
    edited(checkpoint, iter=None)  # as prune and grow leave it
    text = readme_of(checkpoint, tmp_path / "pruned")
    assert "Not given: the checkpoint was not written by a training." in text
    assert "- versions: not given" in text
    summary.write_text("[")
    with pytest.raises(DataError, match=r"summary\.json is not the summary"):
        damex.load(checkpoint, device="cpu").card(tmp_path / "broken")


def test_a_link_is_no_picture_of_the_run(save, tmp_path):
    checkpoint = edited(save(), iter=20)
    (tmp_path / "summary.json").write_text(json.dumps(dict(AP, iterations=20)))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "detections.png").symlink_to("secret")
    assert "detections.png" not in readme_of(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out/detections.png").exists()


def test_a_best_checkpoint_brings_its_own_scores(save, tmp_path):
    """Those of the run are of its last iteration."""
    checkpoint = edited(save(), iter=10)
    (tmp_path / "summary.json").write_text(json.dumps(dict(AP, iterations=20)))
    content = torch.load(checkpoint, weights_only=False)
    scalars = dict(AP=0.625, AP50=0.75, images=7.0, boxes=9.0)
    scores = {f"val/mixture/street/{key}": one for key, one in scalars.items()}
    scores |= {"val/mixture/mean/AP": 0.625, "val/mixture/pooled/AP": 0.5}
    history = {key: HistoryBuffer([0.0, one], [1, 1]) for key, one in scores.items()}
    hub = dict(runtime_info=dict(evaluated=10), log_scalars=history)
    torch.save(dict(content, message_hub=hub), checkpoint)
    text = readme_of(checkpoint, tmp_path / "best")
    assert "| street | 0.625 | 0.750 |" in text
    assert "| *pooled* | 0.500 | - |" in text
    # Before these weights, and what is no number.
    for name, place in {"later": 5, "strange": torch.tensor([1, 2])}.items():
        hub["runtime_info"]["evaluated"] = place
        torch.save(dict(content, message_hub=hub), checkpoint)
        assert "0.625" not in readme_of(checkpoint, tmp_path / name)


def test_a_run_without_evaluation_has_no_table(save, tmp_path):
    checkpoint = edited(save(), iter=20)
    (tmp_path / "summary.json").write_text(json.dumps(dict(iterations=20)))
    (tmp_path / "detections.png").write_bytes(b"of a run before")
    text = readme_of(checkpoint, tmp_path / "out")
    assert "Not given: the run was not evaluated." in text
    assert "detections.png" not in text


def test_texts_of_others_are_shown_as_they_are(save, tmp_path):
    evil = "](http://x) <script>|`"
    classes = (evil, *SPACE.classes[1:])
    mapping = ({"car": evil, "person": "person"}, *SPACE.dataset_classes[1:])
    space = replace(SPACE, classes=classes, dataset_classes=mapping)
    licenses = ["--license", "a|b", "--data-license", "park=<b>", "sky=C C\n0"]
    text = readme_of(save(space=space), tmp_path / "out", *licenses)
    escaped = r"\](http://x) \<script\>\|\`"
    assert plain(evil) == escaped
    assert f"- **street** (license: not given): {escaped}, person" in text
    assert evil not in text
    assert r"- **park** (license: \<b\>): person, dog" in text
    assert "- **sky** (license: C C 0): kite" in text
    assert r"- license of the weights: a\|b" in text


def test_the_placement_of_experts_is_in_the_card(save, tmp_path):
    text = readme_of(save(), tmp_path / "experts")
    assert "3 experts in encoder.0" in text
    assert "| park | 1 |" in text
    dense = readme_of(save(moe=False), tmp_path / "dense")
    assert "None: the detector is dense." in dense


def test_from_python(save, photos, tmp_path):
    """The weights that it predicts with, whatever became of their file."""
    checkpoint = save()
    detector = damex.load(checkpoint, device="cpu")
    checkpoint.unlink()
    folder = detector.card(
        tmp_path / "new", license_text="MIT", data_licenses={"sky": "CC0"}
    )
    text = (folder / "README.md").read_text()
    assert "- license of the weights: MIT" in text
    assert "- **sky** (license: CC0): kite" in text
    again = damex.load(folder, device="cpu")
    assert again.datasets == detector.datasets
    assert len([*again.predict(photos)]) == 3
    with pytest.raises(ConfigError, match="has no mixture"):
        again.evaluate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data-license", "sky"], "takes NAME=TEXT"),
        (["--data-license", "skyy=MIT"], "did you mean 'sky'?"),
    ],
)
def test_licenses_are_of_known_datasets(save, tmp_path, capsys, words, said):
    assert main(["card", str(save()), "--out", str(tmp_path / "x"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_what_exists_is_kept(save, tmp_path, capsys):
    checkpoint, out = save(), tmp_path / "out"
    out.mkdir()
    card(checkpoint, out)  # an empty folder is as good as none
    before = (out / "README.md").read_text()
    for taken in (out, checkpoint):
        assert main(["card", str(checkpoint), "--out", str(taken)]) == 2
        assert f"{taken} exists; remove it" in capsys.readouterr().err
    assert (out / "README.md").read_text() == before


def test_no_output_replaces_a_file_of_the_folder(save, photos, tmp_path, capsys):
    folder = card(save(), tmp_path / "out")
    before = (folder / "config.json").read_bytes()
    target = str(folder / "config.json")
    assert main(["predict", str(folder), str(photos), "--json", target]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert (folder / "config.json").read_bytes() == before
