import os

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from damex.datasets.label_space import LabelSpace
from damex.engine.checkpoint import (
    check_label_space,
    check_tensors,
    load_checkpoint_safely,
)
from damex.errors import ConfigError, DataError


def space(*classes, groups=("a", "b")):
    mapping = {name: name for name in classes}
    return LabelSpace(classes, ("a", "b"), (mapping, mapping), groups)


class Payload:
    """A pickle that runs a command when it is loaded without care."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Fetch:
    """A pickle that fetches an attribute of an allowed class."""

    def __reduce__(self):
        return getattr, (HistoryBuffer, "__init__")


def test_what_mmengine_saves_comes_back(tmp_path):
    history = HistoryBuffer([1.0, 3.0], [1, 1])
    content = dict(
        state_dict={"weight": torch.arange(3.0)},
        meta=dict(epoch=2, seed=np.int64(7), values=np.ones(2)),
        message_hub=dict(log_scalars={"train/loss": history}),
    )
    torch.save(content, tmp_path / "epoch_2.pth")
    loaded = load_checkpoint_safely(tmp_path / "epoch_2.pth")
    assert loaded["state_dict"]["weight"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["meta"]["seed"] == 7
    assert loaded["message_hub"]["log_scalars"]["train/loss"].mean() == 2.0


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    marker = tmp_path / "owned"
    torch.save(dict(state_dict=Payload(f"touch {marker}")), tmp_path / "evil.pth")
    with pytest.raises(
        DataError, match="holds more than tensors and plain values, and"
    ):
        load_checkpoint_safely(tmp_path / "evil.pth")
    assert not marker.exists()


def test_attributes_are_not_fetched_for_a_checkpoint(tmp_path):
    torch.save(dict(state_dict=Fetch()), tmp_path / "evil.pth")
    with pytest.raises(DataError, match="holds more than"):
        load_checkpoint_safely(tmp_path / "evil.pth")


def test_a_cut_off_checkpoint_names_the_file_and_its_size(tmp_path):
    path = tmp_path / "epoch_1.pth"
    torch.save(dict(state_dict={"weight": torch.zeros(1000)}), path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(
        DataError, match=r"epoch_1\.pth \(2000 bytes\) is not a checkpoint of torch, or"
    ):
        load_checkpoint_safely(path)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com"])
def test_a_file_that_is_no_checkpoint_says_so(tmp_path, content):
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(DataError, match="is not a checkpoint of torch"):
        load_checkpoint_safely(tmp_path / "x.pth")


def test_a_checkpoint_that_is_no_dict_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "x.pth")
    with pytest.raises(DataError, match="holds a list"):
        load_checkpoint_safely(tmp_path / "x.pth")


def test_tensors_have_to_fit_exactly():
    model = torch.nn.Linear(2, 1)
    state = {f"module.{k}": v for k, v in model.state_dict().items()}
    check_tensors(dict(state_dict=state), model, path="x.pth")
    del state["module.bias"]
    state["scale"] = torch.ones(1)
    with pytest.raises(
        ConfigError, match=r"1 tensors are missing .*'bias'.*1 are too many .*'scale'"
    ):
        check_tensors(state, model, path="x.pth")


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no checkpoint"):
        load_checkpoint_safely(tmp_path / "none.pth")


def test_other_classes_are_refused():
    stored = dict(dataset_meta=space("car", "bus").to_metainfo())
    check_label_space(stored, space("car", "bus"), path="x.pth")
    with pytest.raises(ConfigError, match="trained on 2 classes of a, b"):
        check_label_space(stored, space("bus", "car"), path="x.pth")


def test_other_groups_are_refused():
    stored = dict(dataset_meta=space("car").to_metainfo())
    with pytest.raises(ConfigError, match=r"\['a', 'b'\], the config has \['a', 'a'\]"):
        check_label_space(stored, space("car", groups=("a", "a")), path="x.pth")


def test_a_checkpoint_of_plain_mmdet_is_not_checked():
    check_label_space(dict(dataset_meta=dict(classes=("x",))), space("car"), path="")
    check_label_space({}, space("car"), path="")
