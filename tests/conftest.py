"""Fixtures for all tests: small real datasets on disk, small real detectors."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mmdet
import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData
from PIL import Image
from torch import distributed, nn
from torch.utils._triton import has_triton_package

import damex.registry  # noqa: F401

# A shell starts background jobs with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's compiler imports triton where it finds it, and compiles for the CPU without.
# triton's bindings would print 500 lines about leaks below pytest's summary. On a GPU
# torch needs it.
if not torch.cuda.is_available():
    sys.modules["triton"] = None  # type: ignore[assignment]
    has_triton_package.cache_clear()  # mmdet imports Transformers, which asks

MMDET_CONFIGS = Path(mmdet.__file__).parent / ".mim" / "configs"
CONFIGS = Path(__file__).parents[1] / "configs"


def shipped_configs(*, complete: bool = True, folder: str = "") -> list[Path]:
    """Configs of the repository: of detectors, or the parts in a folder of `_base_`.

    Not those that a user has put beside them.
    """
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", "*.py"]
    done = subprocess.run(
        words, cwd=CONFIGS, check=True, capture_output=True, text=True
    )
    paths = [CONFIGS / name for name in sorted(done.stdout.split("\0")) if name]
    if folder:
        return [path for path in paths if path.parent == CONFIGS / "_base_" / folder]
    return [p for p in paths if not complete or "_base_" not in p.parts]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the slowest test files of a long run."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("ten slowest files")
        for name, spent in seconds.most_common(10):
            terminalreporter.write_line(f"{spent:8.1f} s  {name}")


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Registries as a config sets them up.

    The import above fills mmdet's registries (and makes mmdet importable where mmcv has
    no compiled ops); the scope lets mmengine's ``Compose`` find mmdet's transforms.
    """
    init_default_scope("mmdet")
    # Every mmengine dataset calls gc.collect(); without a freeze, each call looks
    # through all of torch and takes 0.2 s.
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # it would count them one by one, 60 ms a mixture
    read = functools.cache(Config._file2dict)

    def read_once(filename: str, *arguments: Any, **options: Any) -> Any:
        path = os.path.abspath(filename)  # noqa: PTH100 - links stay
        if not path.startswith((str(CONFIGS), str(MMDET_CONFIGS))):
            return read.__wrapped__(filename, *arguments, **options)
        return copy.deepcopy(read(path, *arguments, **options))

    # A test reads ten files of `_base_` on average, 10 ms each.
    Config._file2dict = staticmethod(read_once)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess]:
    """Run python with arguments in a process of its own, which ends with ``status``."""

    def run(*arguments: Any, status: int = 0, env: Any = (), **kwargs: Any) -> Any:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **dict(env)},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            **kwargs,
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


FORK = """
import os, socket, sys
import numpy
from importlib import import_module
from pathlib import Path
from torch.multiprocessing import start_processes

count, script = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
sys.path.insert(0, str(script.parent))
main = import_module(script.stem).main
with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))

def run(rank):
    numpy.random.seed()  # a fork has the parent's state
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    main()

start_processes(run, nprocs=count, start_method="fork")
"""


@pytest.fixture(scope="session")
def launch_processes(run_python) -> Callable[..., None]:
    """Runs ``main`` of a script, imported once, in forks with the ranks of torchrun."""

    def launch(script: Any, *arguments: Any, count: int, on_gpus: bool = False) -> None:
        safe = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # a look at GPUs before the fork
        env = safe if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
        run_python("-c", FORK, count, script, *arguments, env=env)

    return launch


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which no file grows beyond some bytes, as on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture(scope="session")
def make_coco_dataset() -> Callable[..., dict[str, Any]]:
    """Factory of COCO datasets; see :func:`_write_coco_dataset`."""
    return _write_coco_dataset


@pytest.fixture
def edit_json() -> Callable[[str | Path, Callable[[dict], Any]], None]:
    """``edit_json(path, change)``: load a JSON file, ``change(document)``, write it."""

    def edit(path: str | Path, change: Callable[[dict], Any]) -> None:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        change(document)
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    return edit


@pytest.fixture
def two_datasets(tmp_path: Path) -> list[dict[str, Any]]:
    """Entries of a ``mixture`` whose two datasets collide wherever they can.

    ``street`` has the classes car, person, bus (in this order) and 5 images; ``park``
    has person, dog, car and 3 images. Image, annotation and category ids and the file
    names of the images are the same in both. ``val.json`` equals ``train.json``.
    """
    return [
        _write_coco_dataset(
            tmp_path / "street", classes=["car", "person", "bus"], num_images=5, seed=1
        ),
        _write_coco_dataset(
            tmp_path / "park", classes=["person", "dog", "car"], num_images=3, seed=2
        ),
    ]


def _write_coco_dataset(
    root: Path,
    *,
    classes: list[str],
    num_images: int,
    boxes_per_image: int = 2,
    size: tuple[int, int] = (48, 32),
    seed: int = 0,
) -> dict[str, Any]:
    """Write ``images/0.png`` ..., ``train.json`` and an equal ``val.json``.

    Images are noise of ``size`` (width, height), boxes have random whole-number
    corners; box ``b`` of image ``i`` has class number ``(i + b) % len(classes)``. All
    ids start at 1, categories in the order of ``classes``. Returns the dataset's entry
    for ``mixture``, named like the folder ``root``.
    """
    rng = np.random.default_rng(seed)
    width, height = size
    (root / "images").mkdir(parents=True)
    images, annotations = [], []
    for i in range(num_images):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
        images.append(dict(id=i + 1, file_name=f"{i}.png", width=width, height=height))
        for b in range(boxes_per_image):
            w, h = (int(rng.integers(side // 4, side // 2)) for side in size)
            x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=i + 1,
                    category_id=(i + b) % len(classes) + 1,
                    bbox=[x, y, w, h],
                    area=w * h,
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, start=1)]
    document = dict(images=images, annotations=annotations, categories=categories)
    for split in ("train", "val"):
        (root / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")
    return dict(
        name=root.name,
        data_root=f"{root}/",
        train="train.json",
        val="val.json",
        img="images/",
    )


VOC_XML = """<annotation>
<size><width>48</width><height>32</height><depth>3</depth></size>{objects}
</annotation>"""
VOC_OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>
<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax><ymax>26</ymax></bndbox></object>"""


@pytest.fixture
def write_voc() -> Callable[..., None]:
    """Write a dataset in VOC layout: the objects of each image, and the lists.

    All objects have the same box. Names with a ``?`` at the end are difficult.
    """

    def write(root: Path, objects: dict[str, list[str]], **lists: str) -> None:
        for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for stem, names in objects.items():
            rows = [
                VOC_OBJECT.format(name=n.removesuffix("?"), difficult=int(n[-1] == "?"))
                for n in names
            ]
            text = VOC_XML.format(objects="".join(rows))
            (root / "Annotations" / f"{stem}.xml").write_text(text)
            image = Image.new("RGB", (48, 32), stem.encode()[0])
            image.save(root / "JPEGImages" / f"{stem}.jpg")
        for split, stems in lists.items():
            (root / f"ImageSets/Main/{split}.txt").write_text(stems)

    return write


@functools.cache
def _read(path: Path) -> Config:
    """A config file, parsed once; to be copied before it is changed."""
    return Config.fromfile(path)


@pytest.fixture
def model_config():
    """Config of the tiny DINO with DAMEX, for three dataset groups and four classes."""

    def make(*, moe="damex", num_groups=3, base="moe-dino_tiny", divisor=64, **changes):
        cfg = copy.deepcopy(_read(CONFIGS / f"_base_/models/{base}.py").model)
        cfg.bbox_head.num_classes = 4
        if isinstance(moe, str):
            moe = copy.deepcopy(_read(CONFIGS / f"_base_/moe/{moe}.py").moe)
        cfg.data_preprocessor.pad_size_divisor = divisor  # 64 has enough cells
        cfg.update(moe=moe, num_groups=num_groups, **changes)
        return cfg

    return make


@pytest.fixture
def build(model_config):
    """Build and initialise a detector under a fixed seed."""

    def make(**kwargs):
        return initialized(model_config(**kwargs))

    return make


def initialized(model):
    torch.manual_seed(0)
    detector = MODELS.build(model)
    detector.init_weights()
    return detector


class OwnExperts(nn.Module):
    """A bank of a user's own: one matrix per expert, in a tensor without axes."""

    def __init__(self, num_experts: int, embed_dims: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.embed_dims = embed_dims
        self.weight = nn.Parameter(torch.empty(num_experts, embed_dims, embed_dims))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, tokens_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        rows = tokens_RD.split(counts_E.tolist())
        return torch.cat([x @ w for x, w in zip(rows, self.weight, strict=True)])


@pytest.fixture
def own_experts(monkeypatch):
    """Registers two banks of a user's own, of which one declares its rows."""

    class DeclaredExperts(OwnExperts):
        expert_rows = ("weight",)

    for kind in (OwnExperts, DeclaredExperts):
        monkeypatch.setitem(MODELS.module_dict, kind.__name__, kind)


@pytest.fixture
def tokens_BND():
    """Tokens of two images, 8 wide."""
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def group():
    """This process as a group of one."""
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def batch_of(groups, *, sizes=None, boxes=None, seed=0):
    """Data as a loader hands it to ``data_preprocessor``: images with boxes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes or [(64, 64)] * len(groups)
    boxes = boxes or [2] * len(groups)
    inputs, samples = [], []
    for group, (height, width), count in zip(groups, sizes, boxes, strict=True):
        image = torch.randint(0, 256, (3, height, width), generator=generator)
        inputs.append(image.to(torch.uint8))
        shape = dict(img_shape=(height, width), ori_shape=(height, width), img_id=1)
        sample = DetDataSample(metainfo=dict(scale_factor=(1.0, 1.0), **shape))
        if group is not None:
            sample.set_metainfo(dict(group_id=group, dataset_id=group))
        corner = torch.rand(count, 2, generator=generator) * 20
        sample.gt_instances = InstanceData(
            bboxes=torch.cat([corner, corner + 24], dim=1),
            labels=torch.randint(0, 4, (count,), generator=generator),
        )
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


@pytest.fixture(scope="session")
def make_batch():
    """Factory of batches; see :func:`batch_of`."""
    return batch_of


# damex's detectors and the configs of mmdet that theirs are built from.
DETECTORS = {
    "MoEDINO": "dino/dino-4scale_r50_8xb2-12e_coco.py",
    "MoEDeformableDETR": "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py",
    "MoEDABDETR": "dab_detr/dab-detr_r50_8xb2-50e_coco.py",
    "MoEConditionalDETR": "conditional_detr/conditional-detr_r50_8xb2-50e_coco.py",
    "MoEDETR": "detr/detr_r50_8xb2-150e_coco.py",
    "MoEDDQDETR": "ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py",
}


@pytest.fixture(params=DETECTORS)
def detector_name(request):
    """Every detector of damex, one after the other."""
    return request.param


@pytest.fixture
def build_mmdet():
    """Build a detector from mmdet's own config plus ``moe``, shrunk."""

    def make(name, *, num_groups=2, moe=None, **changes):
        model = copy.deepcopy(_read(MMDET_CONFIGS / DETECTORS[name]).model)
        model.backbone.init_cfg = None  # the pretrained weights are a download
        # Some of mmdet's encode the places of queries in 256 channels always.
        is_wide = name == "MoEConditionalDETR" or changes.get("as_two_stage", False)
        _narrow(model, embed_dims=256 if is_wide else 32)
        model.bbox_head.embed_dims = 256 if is_wide else 32
        model.backbone.update(depth=18, base_channels=8, stem_channels=8)
        widths = {2048: 64, 1024: 32, 512: 16}
        model.neck.in_channels = [widths[c] for c in model.neck.in_channels]
        model.update(type=name, moe=moe, num_groups=num_groups, num_queries=20)
        model.test_cfg.max_per_img = 10
        if "dn_cfg" in model:
            model.dn_cfg.group_cfg.num_dn_queries = 12
        for part in ("encoder", "decoder"):
            model[part].num_layers = 2
            model[part].update(changes.pop(part, {}))
        model.update(changes)
        return initialized(model)

    return make


def _narrow(config, *, embed_dims):
    """Replace the widths of a DETR, wherever they stand."""
    small = {
        "embed_dims": embed_dims,
        "out_channels": embed_dims,
        "feedforward_channels": 64,
        "num_feats": embed_dims // 2,
        "num_groups": 4,
    }
    for key, value in config.items():
        if isinstance(value, dict):
            _narrow(value, embed_dims=embed_dims)
        elif key in small and isinstance(value, int):
            config[key] = small[key]


@pytest.fixture
def run_loss():
    """``run_loss(detector, batch)``: mmdet's loss dict, under a fixed seed."""

    def run(detector, batch, *, iteration=0, max_iters=10):
        detector.train()
        detector.begin_step(iteration=iteration, max_iters=max_iters)
        torch.manual_seed(1)
        data = detector.data_preprocessor(copy.deepcopy(batch), True)
        return detector(**data, mode="loss")

    return run


@pytest.fixture
def run_predict():
    """``run_predict(detector, batch)``: mmdet's data samples."""

    def run(detector, batch):
        detector.eval()
        detector.counts_tokens = True
        data = detector.data_preprocessor(copy.deepcopy(batch), False)
        with torch.no_grad():
            return detector(**data, mode="predict")

    return run


@pytest.fixture
def total():
    """``total(losses)``: what mmengine would call the loss."""

    def add_up(losses):
        return sum(
            torch.stack(v).sum() if isinstance(v, list) else v
            for k, v in losses.items()
            if "loss" in k
        )

    return add_up


@pytest.fixture
def records(monkeypatch):
    """Records of every MoE layer, as they enter the routing context."""
    from damex.models.context import RoutingContext

    seen = {}
    add = RoutingContext.add
    monkeypatch.setattr(
        RoutingContext,
        "add",
        lambda self, name, record: (
            seen.update({name: record}),
            add(self, name, record),
        ),
    )
    return seen


ALONE = """
import sys

class Alone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Alone())
"""


@pytest.fixture
def run_alone(run_python) -> Callable[..., str]:
    """Run code in a process without damex, mmdet and others; return what it prints."""

    def run(code: str, folder: Path, *others: str) -> str:
        hidden = ("damex", "mmcv", "mmdet", "mmengine", *others)
        return run_python("-c", ALONE.format(hidden=hidden) + code, cwd=folder).stdout

    return run
