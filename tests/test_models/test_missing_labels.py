"""A class that one dataset of two annotates, though it stands in the images of both.

Each place of DINO where a class can be taught or can compete is looked at by a probe,
which has to notice the class there without the mask.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mmengine.dataset import pseudo_collate

from damex.datasets.mixture import MixtureDataset
from damex.workbench.toydata import generate_toy_mixture
from studies.worlds import WORDS, world_specs

A = WORDS[0]
OTHERS = list(WORDS[1:4])
RUBY, AMBER = 0, 1  # ruby annotates A and the others, amber the others alone
PIPELINE = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(64, 64), keep_ratio=True),
    dict(type="PackDetInputs"),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Two drawn datasets; A and three other words are in use."""
    root = tmp_path_factory.mktemp("worlds") / "worlds"
    specs = world_specs(2, names="agreeing", num_train=12, num_val=1)
    generate_toy_mixture(root, specs=specs)
    entries = [
        dict(
            name=name,
            data_root=f"{root}/{name}/",
            train="train.json",
            img="images/",
            classes=classes,
        )
        for name, classes in (("ruby", [A, *OTHERS]), ("amber", OTHERS))
    ]
    return MixtureDataset(datasets=entries, pipeline=PIPELINE)


def shows_a(dataset, index):
    """Whether A stands in an image, annotated in this mixture or not."""
    source, inner = dataset.locate(index)
    spec, info = dataset.specs[source], dataset.sources[source].get_data_info(inner)
    content = json.loads(Path(spec.data_root, "train.json").read_text())
    (number,) = [c["id"] for c in content["categories"] if c["name"] == A]
    return any(
        record["category_id"] == number
        for record in content["annotations"]
        if record["image_id"] == info["img_id"]
    )


@pytest.fixture
def images(worlds):
    """``images(dataset_id, ...)``: a batch of one image per id, A in all of them."""
    found = {RUBY: [], AMBER: []}
    for index in range(len(worlds)):
        if shows_a(worlds, index):
            found[worlds.locate(index)[0]].append(index)

    def batch(*datasets):
        rows = [iter(found[RUBY]), iter(found[AMBER])]
        return pseudo_collate([worlds[next(rows[number])] for number in datasets])

    return batch


@pytest.fixture
def detector(build, worlds):
    """``detector(masked)``: a dense detector of the two datasets."""
    coverage = worlds.label_space.coverage()
    assert coverage["labels"] == [[0, 1, 2, 3], [1, 2, 3]]

    def make(masked):
        return build(
            moe=None, label_coverage=coverage, ignore_unannotated_classes=masked
        )

    return make


def logit_gradients(detector, batch, run_loss, total):
    """Gradient of the loss with respect to the scores of A, per branch (..., B, N)."""
    logits = []

    def keep(module, inputs, output):
        output.retain_grad()
        logits.append(output)

    handles = [
        # First of all hooks: what the branch says, before anything is masked.
        branch.register_forward_hook(keep, prepend=True)
        for branch in detector.bbox_head.cls_branches
    ]
    total(run_loss(detector, batch)).backward()
    for handle in handles:
        handle.remove()
    assert len(logits) == len(detector.bbox_head.cls_branches)
    return [one.grad[..., 0] for one in logits]


@pytest.mark.parametrize("masked", [False, True])
def test_the_mask_leaves_exactly_no_gradient_where_a_is_not_annotated(
    detector, images, run_loss, total, masked
):
    """Without it, every image of the other dataset lowers the scores of A."""
    batch = images(AMBER, RUBY, AMBER)
    for gradient in logit_gradients(detector(masked), batch, run_loss, total):
        for amber in gradient[[0, 2]]:
            assert (amber >= 0).all()
            assert (amber > 0).any() == (not masked)
        assert (gradient[1] != 0).any()


# --- the places, one by one -----------------------------------------------------------


def classification(model, batch, run_loss):
    """The loss of the queries that are matched, in all layers of the decoder."""
    losses = run_loss(model, batch)
    names = [name for name in losses if name.endswith("loss_cls")]
    names = [name for name in names if "dn" not in name and "enc" not in name]
    return teaches_a(model, sum(losses[name] for name in names))


def denoising(model, batch, run_loss):
    """The loss of the denoising queries."""
    losses = run_loss(model, batch)
    return teaches_a(model, sum(v for k, v in losses.items() if "dn_loss_cls" in k))


def encoder_loss(model, batch, run_loss):
    """The loss of the tokens that were chosen as queries."""
    return teaches_a(model, run_loss(model, batch)["enc_loss_cls"])


def teaches_a(model, loss):
    rows = [branch.weight for branch in model.bbox_head.cls_branches]
    found = torch.autograd.grad(loss, rows, allow_unused=True)
    return any((row[0] != 0).any() for row in found if row is not None)


def matching(model, batch, run_loss):
    """What the assigner is given; FocalLossCost reads columns of annotated classes.

    Other costs may look at all of them.
    """
    seen, assign = [], model.bbox_head.assigner.assign

    def look(pred_instances, **others):
        seen.append(pred_instances.scores[:, 0])
        return assign(pred_instances=pred_instances, **others)

    model.bbox_head.assigner.assign = look
    raise_a(model)
    run_loss(model, batch)
    return any((scores > -100).any() for scores in seen)


def selection(model, batch, run_loss):
    """Which tokens become queries."""
    chosen, topk = [], torch.topk

    def look(*args, **kwargs):
        found = topk(*args, **kwargs)
        chosen.append(found[1])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", look)
        run_loss(model, batch)
        # Random in the tokens, so that another class would choose others.
        raise_a(model)
        run_loss(model, batch)
    first, second = (row.sort(1)[0] for row in (chosen[0], chosen[len(chosen) // 2]))
    return not torch.equal(first, second)


def raise_a(model):
    with torch.no_grad():
        for branch in model.bbox_head.cls_branches:
            branch.weight[0].normal_(std=3.0)
            branch.bias[0] += 30.0


PROBES = [classification, matching, denoising, selection, encoder_loss]


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("masked", [True, False])
def test_an_unannotated_class_plays_no_part(probe, masked, detector, images, run_loss):
    found = probe(detector(masked), images(AMBER, AMBER), run_loss)
    assert found == (not masked)
