import functools
import http.server
import math
import os
import re
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from mmdet.apis import DetInferencer, init_detector
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModule
from mmengine.runner import CheckpointLoader

from damex.datasets.label_space import LabelSpace
from damex.engine.checkpoint import (
    check_finite,
    check_label_space,
    check_tensors,
    replace_misfits,
)
from damex.engine.config import resolve_config
from damex.errors import ConfigError, DataError
from damex.inference.predictor import Predictor


def space(*classes, groups=("a", "b")):
    mapping = {name: name for name in classes}
    return LabelSpace(classes, ("a", "b"), (mapping, mapping), groups)


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), "cpu", logger="silent")


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


@pytest.mark.parametrize("package", ["core", "_core"])
def test_a_file_of_another_numpy_is_read(tmp_path, package):
    """Versions 1 and 2 write other names of the same functions."""
    written, renamed = tmp_path / "written.pth", tmp_path / "renamed.pth"
    torch.save(dict(meta=dict(seed=np.int64(7), values=np.ones(2))), written)
    own = b"cnumpy._core." if np.__version__ >= "2" else b"cnumpy.core."
    with zipfile.ZipFile(written) as old, zipfile.ZipFile(renamed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                assert own in content
                content = content.replace(own, f"cnumpy.{package}.".encode())
            new.writestr(name, content)
    meta = load(renamed)["meta"]
    assert meta["seed"] == 7
    assert np.array_equal(meta["values"], np.ones(2))


@pytest.fixture
def evil(tmp_path):
    """A checkpoint that makes a file when it is loaded without care."""
    marker, path = tmp_path / "owned", tmp_path / "evil.pth"
    torch.save(dict(state_dict=Payload(f"touch {marker}")), path)
    yield path
    assert not marker.exists()


REFUSED = "holds more than tensors and plain values, or is cut off. It was not loaded"


def load_for_init_cfg(path):
    module = BaseModule(init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    module.init_weights()


@pytest.mark.parametrize("load", [load, load_for_init_cfg])
def test_code_in_a_checkpoint_is_not_run(evil, load):
    with pytest.raises(DataError, match=REFUSED):
        load(evil)


@pytest.mark.parametrize("start", [init_detector, DetInferencer])
def test_code_is_not_run_for_inference(evil, write_config, tmp_path, start):
    config = tmp_path / "resolved.py"
    resolve_config(Config.fromfile(write_config())).dump(config)
    with pytest.raises(DataError, match=REFUSED):
        start(str(config), str(evil), device="cpu")


def test_advice_for_mmengine_changes_nothing(evil, monkeypatch, tmp_path):
    """A variable that is often set because mmengine's own files need it."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    before = dict(os.environ)
    torch.save(dict(weight=torch.ones(1)), tmp_path / "good.pth")
    assert load(tmp_path / "good.pth")["weight"].tolist() == [1.0]
    with pytest.raises(DataError, match=REFUSED):
        load(evil)
    assert dict(os.environ) == before


def test_threads_load_at_the_same_time(tmp_path):
    content = dict(state_dict={}, meta=dict(seed=np.int64(7)))
    torch.save(content, tmp_path / "x.pth")
    with ThreadPoolExecutor(8) as pool:
        loaded = [*pool.map(load, [tmp_path / "x.pth"] * 64)]
    assert [one["meta"]["seed"] for one in loaded] == [7] * 64


def test_other_calls_of_torch_load_are_left_alone(evil, tmp_path):
    with pytest.raises(DataError):
        load(evil)
    torch.save(Fetch(), tmp_path / "own.pth")
    torch.load(tmp_path / "own.pth", weights_only=False)


@pytest.fixture
def website(tmp_path, monkeypatch):
    """A folder that is served on the web; torch's cache is a folder beside it."""
    folder = tmp_path / "website"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_addresses_that_end_in_one_name_are_two_checkpoints(website):
    folder, address = website
    for place in ("a", "b"):
        (folder / place).mkdir()
        torch.save(dict(name=place), folder / place / "last.pth")
    assert [load(f"{address}/{place}/last.pth")["name"] for place in "ab"] == ["a", "b"]
    (folder / "a" / "last.pth").unlink()
    assert load(f"{address}/a/last.pth")["name"] == "a"  # is not fetched again


def test_a_hash_in_the_name_is_that_of_the_content(website):
    folder, address = website
    torch.save({}, folder / "dino-0123abcd.pth")
    with pytest.raises(DataError, match=r"dino-0123abcd\.pth cannot be read .*invalid"):
        load(f"{address}/dino-0123abcd.pth")
    with pytest.raises(DataError, match=r"cannot be read .*HTTP Error 404"):
        load(f"{address}/none.pth")


def test_code_is_not_run_from_an_address(website, evil):
    folder, address = website
    (folder / "evil.pth").write_bytes(evil.read_bytes())
    with pytest.raises(DataError, match=REFUSED):
        load(f"{address}/evil.pth")


@pytest.mark.parametrize("forced", ["0", "1"])
def test_the_schemes_of_mmengine_load_as_data_too(website, evil, monkeypatch, forced):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)
    folder, address = website
    torch.save(dict(conv1=torch.ones(1)), folder / "resnet.pth")
    (folder / "evil.pth").write_bytes(evil.read_bytes())
    names = dict(good=f"{address}/resnet.pth", evil=f"{address}/evil.pth")
    monkeypatch.setattr(
        "mmengine.runner.checkpoint.get_torchvision_models", lambda: names
    )
    assert load("torchvision://good")["conv1"].tolist() == [1.0]
    with pytest.raises(DataError, match=REFUSED):
        load("torchvision://evil")
    with pytest.raises(DataError, match=r"torchvision://resnet cannot be read .*'resn"):
        load("torchvision://resnet")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (dict(state_dict=Fetch()), "holds more than"),
        ([1, 2], "holds a list"),
        (dict(state_dict=["module.x"]), "its state_dict is not a dict"),
        (dict(state_dict={}, meta=[1]), "its meta is not a dict"),
    ],
)
def test_what_is_more_than_a_dict_of_data_is_refused(tmp_path, content, error):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(DataError, match=error):
        load(tmp_path / "x.pth")


def test_a_cut_off_checkpoint_of_torch_before_1_6_is_one_line_wherever_it_ends(
    tmp_path,
):
    path, content = tmp_path / "x.pth", dict(weight=torch.ones(2))
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert load(path)["weight"].tolist() == [1.0, 1.0]
    whole = path.read_bytes()
    for size in range(len(whole) - 8):  # behind them load() asks for no more
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"cut off|cannot be read") as caught:
            load(path)
        assert "\n" not in str(caught.value)


def test_a_file_that_is_no_checkpoint_says_so(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(dict(state_dict={"weight": torch.zeros(1000)}), path)
    for content in (b"", b"version https://git-lfs", path.read_bytes()[:2000]):
        path.write_bytes(content)
        words = rf"x\.pth \({len(content)} bytes\) is not a checkpoint of torch"
        with pytest.raises(DataError, match=words):
            load(path)


def test_a_missing_checkpoint_is_named_and_a_folder_names_those_in_it(tmp_path):
    with pytest.raises(DataError, match=r"none\.pth is missing in"):
        load(tmp_path / "none.pth")
    with pytest.raises(DataError, match=r"is a folder; name a \.pth file"):
        load(tmp_path)
    torch.save({}, tmp_path / "epoch_3.pth")
    with pytest.raises(DataError, match=r"is a folder; .* in it: epoch_3\.pth\."):
        Predictor(tmp_path)


def test_weights_that_are_no_numbers_are_refused():
    model = torch.nn.Linear(2, 1)
    state = {**model.state_dict(), "count": torch.ones(1, dtype=torch.int64)}
    check_finite(state, path="x.pth")
    for value in (math.nan, math.inf):
        state["bias"] = torch.full((1,), value)
        with pytest.raises(ConfigError, match=r"1 of 3 tensors in x\.pth .* as bias: "):
            check_finite(state, path="x.pth")


def test_names_lose_the_prefix_of_a_wrapper(tmp_path):
    """Detectors of others are often saved as DDP holds them."""
    names, averages = ["backbone.module.w", "b"], {"module.b": 1}
    for content in (
        {f"module.{name}": 0 for name in names},
        dict(
            state_dict={f"module.{name}": 0 for name in names}, ema_state_dict=averages
        ),
    ):
        torch.save(content, tmp_path / "x.pth")
        loaded = load(tmp_path / "x.pth")
        assert [*loaded.get("state_dict", loaded)] == names
        assert loaded.get("ema_state_dict", averages) == averages


def test_tensors_have_to_fit_exactly():
    model = torch.nn.Linear(2, 1)
    state = model.state_dict()
    check_tensors(dict(state_dict=state), model, path="x.pth")
    del state["bias"]
    state["scale"] = torch.ones(1)
    state["weight"] = torch.ones(3, 2)
    with pytest.raises(ConfigError) as caught:
        check_tensors(state, model, path="x.pth")
    text = re.sub(r"(are|have)[^(]*\(such as ", "", str(caught.value))
    for fault in ("bias", "scale", "weight of (3, 2), here (1, 2)"):
        assert f"1 tensors {fault}" in text


def test_a_training_starts_from_what_fits():
    model = torch.nn.Linear(2, 1)
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(1)}
    note = replace_misfits(state, model)
    assert note.startswith("1 of 2 tensors")
    assert "weight of (3, 2), here (1, 2)" in note
    assert torch.equal(state["weight"], model.weight)
    assert state["bias"].item() == 1.0
    assert replace_misfits(state, model) is None


SWAPPED = space("car", "bus").to_metainfo()
SWAPPED["datasets"][0]["classes"] = {"car": "bus", "bus": "car"}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (
            space("bus", "car").to_metainfo(),
            r"classes: place 0 was \['bus'\], is \['car'\] in",
        ),
        (SWAPPED, "class of a's 'bus': was 'car', is 'bus'"),  # the lists are the same
        (
            space("car", "bus", groups=("a", "a")).to_metainfo(),
            r"dataset groups: only in the config: b\.",
        ),
    ],
)
def test_labels_that_mean_something_else_are_refused(stored, words):
    now = space("car", "bus")
    check_label_space(dict(dataset_meta=now.to_metainfo()), now, path="x.pth")
    with pytest.raises(ConfigError, match=words):
        check_label_space(dict(dataset_meta=stored), now, path="x.pth")


def test_a_checkpoint_of_plain_mmdet_is_not_checked():
    check_label_space(dict(dataset_meta=dict(classes=("x",))), space("car"), path="")
    check_label_space({}, space("car"), path="")
