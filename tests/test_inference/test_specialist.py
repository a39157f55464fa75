"""A detector that is taken out answers as the mixture that is told its dataset."""

import numpy as np
import pytest
from mmdet.apis import inference_detector, init_detector
from mmdet.models.detectors import DINO

from damex.__main__ import main
from damex.errors import ConfigError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.export.specialist import extract
from tests.conftest import ALONE
from tests.test_inference.conftest import BEST, SPACE

SHARED = dict(
    layers=dict(decoder="all"),
    fine_grained=dict(parts=4, shared=3, copies=3),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
MOES = {
    "best": BEST,
    "some layers": {**BEST, "layers": dict(decoder=[0])},
    "weights of 2": {
        **BEST,
        "gate": dict(type="TopKGate", k=1, renormalize=True, weight_scale=2.0),
    },
    "shared parts": SHARED,
    "wider": {**BEST, "shared_expert": dict(type="SharedExpert")},
    "low rank": {
        **BEST,
        "experts": dict(type="LowRankExperts"),
        "shared_expert": dict(type="SharedExpert"),
    },
    "one wider layer": {
        **BEST,
        "layers": dict(decoder=[1]),
        "shared_expert": dict(type="SharedExpert"),
    },
    "dense phase": {**BEST, "upcycling": dict(share=0.5)},
}


def compare(checkpoint, folder, images, *, dataset):
    """Largest differences of scores and boxes to the mixture that is told."""
    out = folder / f"{dataset}.pth"
    config = extract(DetectorCheckpoint.read(str(checkpoint)), dataset).write(out)
    detector = init_detector(str(config), str(out), device="cpu")
    assert type(detector) is DINO
    predictor = Predictor(checkpoint, device="cpu")
    worst = []
    for image in images:
        (told,) = predictor(image, dataset=dataset, min_score=0.0)
        plain = inference_detector(detector, str(image)).pred_instances.numpy()
        names = [detector.dataset_meta["classes"][label] for label in plain.labels]
        assert tuple(names) == told.names
        relative = np.abs(plain.bboxes - told.boxes).max() / told.width
        worst.append((np.abs(plain.scores - told.scores).max(), relative))
    return np.max(worst, axis=0)


@pytest.mark.parametrize("moe", MOES.values(), ids=MOES)
def test_the_specialist_equals_the_mixture_that_is_told(save, photos, tmp_path, moe):
    checkpoint = save(moe=moe)
    images = [photos / "a.png", photos / "b.jpg"]
    assert (compare(checkpoint, tmp_path, images, dataset="park") < 1e-5).all()


@pytest.mark.parametrize(
    ("options", "dataset"),
    [
        ({}, "sky"),  # 50 queries and 1 class: 50 detections, not the mixture's 100
        (dict(moe=False, image_balance=0.5), "park"),
        (dict(base="moe-dino-mini_efficientnet-lite0"), "park"),
    ],
    ids=["one class", "dense", "timm"],
)
def test_other_detectors(save, photos, tmp_path, options, dataset):
    found = compare(save(**options), tmp_path, [photos / "a.png"], dataset=dataset)
    assert (found < 1e-5).all()


REFUSALS = {
    "k": ({"gate": dict(type="TopKGate", k=2), "image_vote": False}, "gate has k=2"),
    "soft": ({"gate": dict(type="TopKGate", k=1)}, "renormalize=False"),
    "gate": (
        {"gate": dict(type="DenseSoftmaxGate"), "image_vote": False},
        "its gate is a DenseSoftmaxGate",
    ),
    "no groups": (
        {"num_experts": 2, "losses": [], "image_vote": False},
        "its experts belong to no dataset",
    ),
    "several": ({"num_experts": 6}, "the dataset has 2 experts"),
    "linear": (
        {
            "experts": dict(type="LowRankExperts"),
            "shared_expert": dict(type="SharedExpert", activation="tanh"),
        },
        "its experts have tanh",
    ),
    "activation": (
        {"experts": dict(type="FFNExperts", activation="gelu")},
        "have gelu",
    ),
    "norm": ({"block": dict(norm="pre")}, "a norm before its experts"),
    "channels": (
        dict(layers=dict(decoder="all"), channels=dict()),
        "has moe.channels, which no dense detector",
    ),
}


@pytest.mark.parametrize(("changes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_has_no_dense_equal_is_refused(save, changes, words):
    moe = changes if "channels" in changes else {**BEST, **changes}
    stored = DetectorCheckpoint.read(str(save(moe=moe)))
    with pytest.raises(ConfigError, match=words) as caught:
        extract(stored, "park")
    assert "\n" not in str(caught.value)


def test_what_changes_scores_by_dataset_is_refused(save):
    coverage = dict(label_coverage=SPACE.coverage())
    stored = DetectorCheckpoint.read(
        str(save(label_prior=dict(source="head"), **coverage))
    )
    with pytest.raises(ConfigError, match="has label_prior, which"):
        extract(stored, "park")


# mmcv may have no compiled ops here, and mmdet needs some to be imported.
CODE = f"""
from damex.compat import ensure_ops
ensure_ops()
{ALONE.format(hidden=("damex",))}
for name in [n for n in sys.modules if n.split(".")[0] == "damex"]:
    del sys.modules[name]
from mmdet.apis import DetInferencer

inferencer = DetInferencer(sys.argv[1], sys.argv[2], device="cpu", show_progress=False)
(found,) = inferencer(sys.argv[3])["predictions"]
assert not [name for name in sys.modules if name.split(".")[0] == "damex"]
print("scores:", *found["scores"])
"""


@pytest.mark.slow
def test_a_process_without_damex_predicts(save, photos, tmp_path, run_python, capsys):
    checkpoint = save(base="moe-dino-mini_efficientnet-lite0")
    out = tmp_path / "park.pth"
    words = ["export", str(checkpoint), "--dataset", "park", "--out", str(out)]
    assert main(words) == 0
    assert "2 classes" in capsys.readouterr().out
    image = photos / "a.png"
    done = run_python("-c", CODE, out.with_suffix(".py"), out, image)
    scores = [float(v) for v in done.stdout.split("scores:")[1].split()]
    predictor = Predictor(checkpoint, device="cpu")
    (told,) = predictor(image, dataset="park", min_score=0.0)
    np.testing.assert_allclose(scores, told.scores, atol=1e-5)
