"""A stranger's checkpoint, through every command that reads one and what these write.

Code that a checkpoint brings leaves a file behind: either ``os.mkdir`` makes it, or the
import of a module that lies on the path.
"""

import copy
import inspect
import itertools
import json
import os
import re
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from safetensors.torch import save_file

import damex
from damex.__main__ import main
from damex.engine.config import build_runner
from damex.engine.model_folder import CONFIG, WEIGHTS, write_model_folder
from damex.inference.trust import read_literals
from damex.workbench.cli.commands import app
from damex.workbench.growth.prune import NOT_KEPT
from tests.test_engine.conftest import write_config_to  # noqa: F401
from tests.test_inference.conftest import exports_nothing  # noqa: F401

MODULE = "hostile_module"
CALL = f"__import__('{MODULE}')"
FIRST = ("test_dataloader", "dataset", "datasets", 0)


def put(config, place, value):
    """Set a value deep inside of a config."""
    *way, last = place
    for step in way:
        config = config.setdefault(step, {}) if isinstance(step, str) else config[step]
    config[last] = value


# What the detector and its images are built from: every command refuses these.
IN_DETECTOR = {
    "type": (("model", "backbone", "type"), f"{MODULE}.Net"),
    "type of a package": (("model", "neck", "type"), MODULE),
    "evaluated": (("model", "test_cfg", "nms"), dict(type=CALL)),
    "step": (("test_dataloader", "dataset", "pipeline", 1, "type"), f"{MODULE}.Step"),
}
# What only a training or an evaluation builds.
AROUND = {
    "hook": (("custom_hooks",), [dict(type="os.mkdir", path="made")]),
    "package": (("custom_hooks",), [dict(type=MODULE)]),
    "import": (("custom_imports",), dict(imports=[MODULE])),
    "runner": (("runner_type",), f"{MODULE}.Runner"),
    "optimizer": (("optim_wrapper", "optimizer", "type"), f"{MODULE}.SGD"),
    "evaluator": (("test_evaluator", "type"), "os.mkdir"),
    "dataset": ((*FIRST, "val"), dict(type=f"{MODULE}.Data")),
    "address": ((*FIRST, "val"), "http://HOST/val.json"),
    "folder": (("default_hooks", "checkpoint", "out_dir"), "made"),
    "unpickled": ((*FIRST, "val"), dict(type="BaseDetDataset", ann_file="made.pkl")),
    "default scope": (("default_scope",), MODULE),
    "visualizer": (("visualizer", "type"), f"{MODULE}.Draw"),
    "compiler": (("compile",), dict(options={"cpp.cxx": "mkdir"})),
    "other file": (("_base_",), "hostile.py"),
}
UNUSED = [v for k, v in AROUND.items() if k not in ("dataset", "unpickled")]
# Parts with initial weights, which no command needs.
INITIAL = ("neck", "bbox_head", "backbone")
# No value at all, but a program; `prune` and `merge` would write it down.
TEXT = {
    "call": f"x = {CALL}\n",
    "import": f"import {MODULE}\n",
}


class Payload:
    def __reduce__(self):
        return os.mkdir, ("made",)


SMALL = """
data_check = "off"
model = dict(num_queries=20, test_cfg=dict(max_per_img=20))
model.update(encoder=dict(num_layers=1), decoder=dict(num_layers=1))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_coco_dataset, write_config_to):  # noqa: F811
    """A config, and the checkpoint of its detector."""
    folder = tmp_path_factory.mktemp("trained")
    names = dict(street=["car", "bus"], park=["dog"], sky=["kite"])
    entries = [
        make_coco_dataset(folder / name, classes=classes, num_images=2)
        for name, classes in names.items()
    ]
    make = dict(moe="damex_best", extra=SMALL)
    config = write_config_to(folder, mixture=entries[:2], **make)
    write_config_to(folder, mixture=entries, name="grown", **make)
    write_config_to(folder, mixture=entries[:2], moe="dense", name="dense")
    for name in ("config", "dense"):
        runner = build_runner(Config.fromfile(folder / f"{name}.py"))
        runner.model.init_weights()
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        runner.param_schedulers = []
        runner.save_checkpoint(str(folder), f"{name}.pth")
    return config


@pytest.fixture
def server():
    """Address of a server, and the requests that it has got."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{made.server_port}", asked
        made.shutdown()


@pytest.fixture
def bait(trained, tmp_path, monkeypatch):
    """``bait(*changes, ...)``: a checkpoint; nothing of it may have run in the end."""
    monkeypatch.chdir(tmp_path)
    sys.modules.pop(MODULE, None)  # of a test that failed
    made = tmp_path / "made"
    code = f"from pathlib import Path\nPath({str(made)!r}).mkdir()\n"
    for name in (MODULE, "hostile"):
        (tmp_path / f"{name}.py").write_text(code)
    torch.save(Payload(), "payload.bin")
    monkeypatch.syspath_prepend(tmp_path)

    def make(*changes, text="", state=None, name="config", form="file"):
        content = torch.load(trained.with_name(f"{name}.pth"), weights_only=False)
        config = read_literals(content["meta"]["cfg"], where="")
        for place, value in changes:
            put(config, place, copy.deepcopy(value))
        if form == "folder":
            path = Path("stranger")
            path.mkdir()
            space = content["meta"]["dataset_meta"]
            write_model_folder(
                path, content["state_dict"], config=config, label_space=space
            )
            return str(path)
        lines = [f"{key} = {value!r}\n" for key, value in config.items()]
        content["meta"].update(cfg="".join(lines) + text, config=f"x = {CALL}")
        if isinstance(state, float):
            next(iter(content["state_dict"].values())).fill_(state)
        elif state is not None:
            content["state_dict"] = state
        torch.save(content, "stranger.pth")
        return "stranger.pth"

    yield make
    assert not made.exists()
    assert MODULE not in sys.modules


SHORT = "--work-dir work --cfg-options train_dataloader.sampler.samples_per_epoch=2"
# The command lines that read a checkpoint PTH: those that build what its config says,
# those that write this down, and those that have a config of the user.
READING = {
    "predict": ["predict PTH DATA/street/images/0.png"],
    "export": [
        "export PTH --dataset street --out new.pth",
        "export PTH --dataset street --out new.onnx",
        "export PTH --out new.onnx",
    ],
    "experts": [
        "experts PTH --images DATA/street/images",
        "experts PTH --images DATA/street/images --out new.png",
    ],
    "grow": ["grow PTH DATA/grown.py --images 1 --out new.pth"],
    "data complete": [
        "data complete PTH --min-score 0.01 --out new",
        "data complete PTH --data DATA/street DATA/park --min-score 0.01 --out new",
    ],
}
WRITING = {
    "prune": ["prune PTH --drop park --out new.pth"],
    "merge": ["merge PTH --datasets street park --out new.pth"],
}
# Written down as data, which nothing executes.
SHARING = {"card": ["card PTH --out new"]}
CONFIGURED = {
    "train": [
        f"train DATA/config.py {SHORT} max_epochs=1 load_from=PTH",
        f"train DATA/config.py --resume PTH {SHORT} max_epochs=1",
    ],
    "test": ["test DATA/config.py PTH --work-dir work"],
}


def lines_of(*tables):
    return [line for table in tables for lines in table.values() for line in lines]


def run(line, trained, checkpoint):
    """Run a command line in the current folder; returns its status."""
    line = line.replace("DATA", str(trained.parent)).replace("PTH", checkpoint)
    return main(line.split())


def test_every_command_that_reads_a_checkpoint_is_in_a_table():
    reading = set()
    commands = {name: app[name] for name in app}
    commands |= {f"data {name}": app["data"][name] for name in app["data"]}
    for name, one in commands.items():
        taken = inspect.signature(one.default_command or app).parameters
        if taken.keys() & {"checkpoint", "resume"}:
            reading.add(name)
    assert reading == {*READING, *WRITING, *SHARING, *CONFIGURED}


def broken_files(bait):
    """What stands in the place of a checkpoint, and what is said of it."""
    yield bait(state=Payload()), "more than tensors and plain values"
    yield bait(state=torch.nan), "have values that are nan or infinite"
    Path("folder").mkdir()
    yield "folder", "is a folder; name a .pth file"
    for text in ("", "no checkpoint"):
        Path("text.pth").write_text(text)
        yield "text.pth", "is not a checkpoint of torch, or is cut off"


@pytest.mark.parametrize("line", lines_of(READING, WRITING, SHARING, CONFIGURED))
def test_every_command_refuses_a_broken_checkpoint_in_a_line(
    bait, trained, line, capsys
):
    for path, words in broken_files(bait):
        capsys.readouterr()
        assert run(line, trained, path) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert said.startswith("error: ")
        assert words in said
        assert not list(Path().glob("new*"))


KINDS = {
    **{name: dict(change=change) for name, change in IN_DETECTOR.items()},
    **{f"text: {name}": dict(text=text) for name, text in TEXT.items()},
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "file") for kind in KINDS), *((kind, "folder") for kind in IN_DETECTOR)],
)
def test_no_detector_is_built_that_could_run_code(bait, trained, kind, form, capsys):
    changes = [KINDS[kind]["change"]] if "change" in KINDS[kind] else []
    path = bait(*changes, text=KINDS[kind].get("text", ""), form=form)
    lines = lines_of(READING, WRITING, SHARING)
    if form == "folder" and kind != "type":  # each command meets each kind in a file
        lines = READING["predict"] + WRITING["prune"] + SHARING["card"]
    for line in lines:
        capsys.readouterr()
        assert run(line, trained, path) == 2, line
        assert "could run code" in capsys.readouterr().err
        assert not list(Path().glob("new*"))


def edited(change):
    """An attack on the config of a folder: ``change(content)``."""

    def edit(folder):
        content = json.loads((folder / CONFIG).read_text())
        change(content)
        (folder / CONFIG).write_text(json.dumps(content))

    return edit


def link(target):
    def replace(folder):
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(target)

    return replace


# What is done to the files of a folder, and what is said of it.
IN_FOLDER = {
    "pickle": (lambda f: torch.save(Payload(), f / WEIGHTS), "not a safetensors file"),
    "link to a pickle": (link("../payload.bin"), "not a safetensors file"),
    "endless link": (link("/dev/zero"), f"{WEIGHTS} is not a file"),
    "broken link": (link("nowhere"), f"{WEIGHTS} is missing"),
    "huge header": (
        lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        "not a safetensors file",
    ),
    "cut off": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-4]),
        "is cut off",
    ),
    "type": (
        lambda f: save_file({"a": torch.zeros(1).to(torch.float8_e5m2)}, f / WEIGHTS),
        "is of type torch.float8_e5m2",
    ),
    "no config": (lambda f: (f / CONFIG).unlink(), f"{CONFIG} is missing"),
    "program": (lambda f: (f / CONFIG).write_text(f"x = {CALL}"), "not the JSON file"),
    "depth": (lambda f: (f / CONFIG).write_text("[" * 10**6), "not the JSON file"),
    "constant": (lambda f: (f / CONFIG).write_text("[NaN]"), "NaN is not JSON"),
    "overflow": (lambda f: (f / CONFIG).write_text("[1e999]"), "1e999 is too large"),
    "other format": (edited(lambda c: c.update(format=2)), "its format is 2"),
    "statement": (
        edited(lambda c: c["config"].update({f"x = {CALL}\ny": 1})),
        "not a dict of settings",
    ),
    "labels": (
        edited(lambda c: c["label_space"].update(datasets=[dict(name=1)])),
        "no classes and datasets",
    ),
    "two datasets of a name": (
        edited(lambda c: c["label_space"]["datasets"][1].update(name="street")),
        "no classes and datasets",
    ),
    "a class that is no text": (
        edited(lambda c: c["label_space"]["datasets"][0]["classes"].update(car=1)),
        "no classes and datasets",
    ),
    "experts": (edited(lambda c: c.update(moe="x")), "'moe' is not a dict"),
}


@pytest.mark.parametrize("kind", IN_FOLDER)
def test_a_folder_is_refused_in_a_line_that_names_the_file(bait, trained, kind, capsys):
    path = bait(form="folder")
    (Path(path) / "README.md").write_text(f"<script>{CALL}</script>")
    attack, words = IN_FOLDER[kind]
    attack(Path(path))
    for line in (*READING["predict"], *CONFIGURED["test"]):
        capsys.readouterr()
        assert run(line, trained, path) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert said.startswith(f"error: {path}/")
        assert words in said
        assert "fetch the folder again" in said
        assert not list(Path().glob("new*"))


def test_a_folder_takes_the_place_of_its_checkpoint(bait, trained):
    """Nor is the rest of its config used."""
    path = bait(*UNUSED, form="folder")
    lines = [*READING["predict"], READING["experts"][0], READING["data complete"][1]]
    for line in (*lines, CONFIGURED["train"][0], *CONFIGURED["test"]):
        assert run(line, trained, path) == 0, line


@pytest.mark.usefixtures("exports_nothing")
@pytest.mark.parametrize("line", lines_of(READING))
def test_the_rest_of_a_config_is_not_used(bait, trained, line, server):
    """Nor is it written down: what is left behind can be trained and tested."""
    host, asked = server
    assert run(line, trained, bait(*UNUSED, *initial_weights(host))) == 0
    assert asked == []
    assert_no_initial_weights(host)
    for left in Path().glob("new*.pth"):
        content = torch.load(left, weights_only=True)
        assert MODULE not in content["meta"]["cfg"]
    for left in Path().glob("new*.py"):
        assert Config.fromfile(left).model


@pytest.mark.parametrize("line", lines_of(CONFIGURED))
def test_the_config_of_the_user_is_the_one_that_runs(bait, trained, line):
    name = "dense" if "dense" in line else "config"
    changes = [*AROUND.values()] + ([] if name == "dense" else [*IN_DETECTOR.values()])
    assert run(line, trained, bait(*changes, text=TEXT["call"], name=name)) == 0


@pytest.mark.parametrize(
    ("kind", "line"), [*itertools.product(AROUND, lines_of(WRITING, SHARING))]
)
def test_what_is_written_down_could_not_run_code(bait, trained, kind, line, capsys):
    status = run(line, trained, bait(AROUND[kind]))
    (place, _), folder = AROUND[kind], Path("new", CONFIG)
    if place[0] in (*NOT_KEPT, "custom_imports", "_base_"):
        assert status == 0
        is_folder = line in SHARING["card"]
        read = json.loads(folder.read_text())["config"] if is_folder else None
        config = read or Config.fromfile("new.py")
        assert MODULE not in str(config.get(place[0]))
    else:
        assert status == 2
        assert "could run code" in capsys.readouterr().err
        assert not [*Path().glob("new*"), *Path().glob(".new*")]


# Values that mmengine's writer, or its reader, takes for more than they are.
MISREAD = {
    "key": (("model", "test_cfg", f"a': {CALL}, 'b"), 1),
    "variable": (("log_level",), "{{$HOME:elsewhere}} {{fileDirname}} {{_base_.a}}"),
    "quotes": (("log_level",), "\"' + " + CALL + " + '\""),
}


@pytest.mark.parametrize("kind", MISREAD)
@pytest.mark.parametrize(
    "line", [*lines_of(WRITING), "export PTH --dataset street --out new.pth"]
)
def test_what_is_written_down_is_read_as_it_was(bait, trained, kind, line):
    place, value = MISREAD[kind]
    assert run(line, trained, bait((place, value))) == 0
    cfg = Config.fromfile("new.py")
    if place[0] == "model" or not line.startswith("export"):
        for step in place:
            cfg = cfg[step]
        assert cfg == value


@pytest.mark.parametrize("line", lines_of(WRITING))
def test_files_left_behind_can_be_trained_and_tested(bait, trained, line):
    harmless = [AROUND["import"], AROUND["compiler"], MISREAD["key"]]
    assert run(line, trained, bait(*harmless)) == 0
    assert run("test new.py PTH --work-dir work", trained, "new.pth") == 0
    assert run(f"train new.py {SHORT} max_epochs=1", trained, "") == 0


def initial_weights(host):
    """Changes by which parts start from an address or a file."""
    address = dict(type="Pretrained", checkpoint=f"http://{host}/latest/meta-data")
    file = dict(type="Pretrained", checkpoint="payload.bin")
    override = dict(type="Constant", override=[dict(address, name="convs")])
    places = [("model", part, "init_cfg") for part in INITIAL]
    return zip(places, [address, [override, file], file], strict=True)


def assert_no_initial_weights(host):
    for left in (*Path().glob("new*.p*"), *Path().glob(f"new/{CONFIG}")):
        content = left.read_bytes()
        assert host.encode() not in content
        assert b"payload.bin" not in content


@pytest.mark.parametrize("line", lines_of(WRITING, SHARING))
def test_no_initial_weights_are_fetched_or_kept(bait, trained, line, server, capsys):
    host, asked = server
    assert run(line, trained, bait(*initial_weights(host))) == 0
    assert asked == []
    assert_no_initial_weights(host)
    (note,) = re.findall(r"note: (.*) named initial weights", capsys.readouterr().out)
    assert {*note.split(", ")} == {f"model.{part}.init_cfg" for part in INITIAL}


@pytest.mark.parametrize("line", lines_of(WRITING, SHARING))
def test_no_data_is_fetched(bait, trained, line, server):
    host, asked = server
    value = f"http://{host}/val.json"
    for place in (AROUND["address"][0], ("mixture", 0, "val")):
        assert run(line, trained, bait((place, value))) == 2
    assert asked == []


@pytest.mark.parametrize("line", lines_of(READING, WRITING, SHARING))
@pytest.mark.parametrize("at", ["classes", "name", "key"])
def test_no_name_is_printed_that_controls_a_terminal(bait, trained, line, at, capsys):
    evil = "\x1b]0;owned\x07"
    path = Path(bait())
    content = torch.load(path, weights_only=False)
    space = content["meta"]["dataset_meta"]
    if at == "key":
        content["state_dict"][evil] = torch.zeros(1)
    else:  # everywhere, so that the metadata still fit together
        old = space["classes"][0] if at == "classes" else space["datasets"][0]["name"]
        text = json.dumps(space).replace(json.dumps(old), json.dumps(evil))
        content["meta"]["dataset_meta"] = json.loads(text)
    torch.save(content, path)
    assert run(line, trained, str(path)) == 2
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said
    assert "control a terminal" in said


OWN_NECK = """
from mmdet.models.necks import ChannelMapper
from mmdet.registry import MODELS
@MODELS.register_module(force=True)
class OwnNeck(ChannelMapper):
    pass
"""


def test_with_trust_a_class_of_the_user_works(trained, bait, tmp_path, monkeypatch):
    """A module beside the checkpoint, as ``custom_imports`` of a training has it."""
    (tmp_path / "own_neck.py").write_text(OWN_NECK)
    monkeypatch.delitem(sys.modules, "own_neck", raising=False)
    imports = dict(imports=["damex.registry", "own_neck"])
    own = [(("custom_imports",), imports), (("model", "neck", "type"), "OwnNeck")]
    path = bait(*own)
    for line in (*READING["predict"], *WRITING["prune"]):
        assert run(line, trained, path) == 2
        assert run(f"{line} --trust", trained, path) == 0, line
    assert Config.fromfile("new.py").custom_imports == imports
    detector = damex.load(path, trust=True, device="cpu")
    assert type(detector._predictor._detector.neck).__name__ == "OwnNeck"


def test_a_module_that_is_missing_is_an_error_of_a_line(trained, bait, capsys):
    path = bait((("custom_imports",), dict(imports=["no_such_module"])))
    assert run(f"{READING['predict'][0]} --trust", trained, path) == 2
    assert "start with PYTHONPATH=" in capsys.readouterr().err
