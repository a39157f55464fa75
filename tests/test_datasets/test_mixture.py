"""A mixture of datasets: labels, identities, pipelines, seeds and faults."""

import contextlib
import itertools
import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import pseudo_collate
from torch.utils.data import DataLoader

from damex.datasets.mixture import MixtureDataset, local_seed
from damex.datasets.sampler import MixtureSampler
from damex.errors import ConfigError, DataError

LOAD = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
]
PIPELINE = [*LOAD, dict(type="PackDetInputs")]
FLIP = [*LOAD, dict(type="RandomFlip", prob=0.5), dict(type="PackDetInputs")]


class Refuse(BaseTransform):
    """Refuses the images at the given places of the mixture."""

    def __init__(self, places):
        self.places = places

    def transform(self, results):
        return None if results["sample_idx"] in self.places else results


def file_truth(entry, image_number):
    """(class name, box) of one image, read without any COCO library."""
    document = json.loads((Path(entry["data_root"]) / "train.json").read_text())
    category = {c["id"]: c["name"] for c in document["categories"]}
    image_id = document["images"][image_number]["id"]
    return [
        (category[a["category_id"]], a["bbox"])
        for a in document["annotations"]
        if a["image_id"] == image_id
    ]


def packed_truth(dataset, index):
    """(class name, box) of one sample after the pipeline."""
    truth = dataset[index]["data_samples"].gt_instances
    names = [dataset.metainfo["classes"][label] for label in truth.labels]
    boxes = truth.bboxes.tensor.clone()
    boxes[:, 2:] -= boxes[:, :2]
    return list(zip(names, boxes.tolist(), strict=True))


def load(entries, split="train", pipeline=PIPELINE, **options):
    return MixtureDataset(datasets=entries, split=split, pipeline=pipeline, **options)


@pytest.mark.parametrize("classes", list(itertools.permutations(["car", "dog"])))
@pytest.mark.parametrize("swap", [False, True])
def test_every_box_keeps_its_name_and_its_dataset(two_datasets, classes, swap):
    # Ids, file names and some classes are the same in both datasets.
    two_datasets[1]["classes"] = ["person", *classes]
    entries = two_datasets[::-1] if swap else two_datasets
    dataset = load(entries)
    sizes = [3, 5] if swap else [5, 3]
    assert dataset.sizes == sizes
    assert len(dataset) == 8
    places = [(source, i) for source in range(2) for i in range(sizes[source])]
    for index, (source, number) in enumerate(places):
        assert packed_truth(dataset, index) == file_truth(entries[source], number)
        sample = dataset[index]["data_samples"]
        assert sample.dataset_id == source
        assert sample.dataset_name == entries[source]["name"]
        assert sample.group_id == source
        assert sample.sample_idx == index
        expected = Path(entries[source]["data_root"], "images", f"{number}.png")
        assert Path(sample.img_path) == expected


def test_rename_and_partitioned_reach_the_labels(two_datasets):
    two_datasets[1]["rename"] = dict(dog="bus")
    dataset = load(two_datasets)
    assert dataset.metainfo["classes"] == ("car", "person", "bus")
    # The first image of park has a person and a dog.
    assert [name for name, _ in packed_truth(dataset, 5)] == ["person", "bus"]
    dataset = load(two_datasets, pipeline=PIPELINE, label_space="partitioned")
    names = [name for name, _ in packed_truth(dataset, 5)]
    assert names == ["park/person", "park/bus"]


def test_class_subset_leaves_out_images_in_training_only(two_datasets):
    # Of park's images (person dog | dog car | car person) two have a dog.
    two_datasets[1]["classes"] = ["dog"]
    assert load(two_datasets).sizes == [5, 2]
    assert load(two_datasets, filter_empty=False).sizes == [5, 3]
    assert load(two_datasets, "val").sizes == [5, 3]


def test_subset_of_a_mixture_keeps_the_labels_of_the_whole(two_datasets):
    whole = load(two_datasets)
    subset = load(two_datasets[1:], label_space=whole.metainfo)
    assert subset.metainfo == whole.metainfo
    sample = subset[0]["data_samples"]
    assert sample.dataset_id == 1
    # person and dog: 1 and 3 of car, person, bus, dog
    assert sample.gt_instances.labels.tolist() == [1, 3]


def test_ground_truth_is_the_file_before_the_pipeline(two_datasets, edit_json):
    path = Path(two_datasets[1]["data_root"]) / "val.json"
    edit_json(path, lambda d: d["annotations"][0].update(iscrowd=1, area=7.5))
    halve = dict(type="Resize", scale=(24, 16))
    dataset = load(
        two_datasets,
        split="val",
        pipeline=[LOAD[0], halve, LOAD[1], dict(type="PackDetInputs")],
    )
    sample = dataset[5]["data_samples"]
    records = json.loads(path.read_text())["annotations"][:2]
    assert sample.img_shape == (16, 24)
    # person and dog: labels 1 and 3 of car, person, bus, dog
    expected = [
        dict(bbox=r["bbox"], label=label, area=r["area"], iscrowd=r["iscrowd"])
        for r, label in zip(records, [1, 3], strict=True)
    ]
    assert expected[0]["iscrowd"] == 1
    assert sample.ground_truth == expected


def test_values_are_plain_and_indices_end(two_datasets):
    before = json.dumps(two_datasets)
    dataset = load(two_datasets)
    assert json.dumps(two_datasets) == before
    assert json.loads(json.dumps(dataset.metainfo))["datasets"][1]["name"] == "park"
    assert len(list(itertools.islice(dataset, 20))) == 8
    for index in (-1, 8, 100):
        with pytest.raises(IndexError, match=f"index {index} of .* of 8 samples"):
            dataset.get_data_info(index)
    clone = pickle.loads(pickle.dumps(dataset))
    assert packed_truth(clone, 6) == packed_truth(dataset, 6) == packed_truth(clone, 6)


# --- any mmdet dataset class as a source ----------------------------------------------


@pytest.fixture
def voc_entry(write_voc, tmp_path):
    """A VOC dataset: image a has a sofa and a difficult cat, image b nothing."""
    write_voc(tmp_path / "VOC2007", dict(a=["sofa", "cat?"], b=[]), all="a\nb\n")
    source = dict(
        type="VOCDataset",
        data_root=f"{tmp_path}/",
        ann_file="VOC2007/ImageSets/Main/all.txt",
        data_prefix=dict(sub_data_root="VOC2007/"),
    )
    return dict(name="voc", train=source, val=source, rename=dict(sofa="couch"))


def test_voc_as_a_source(two_datasets, voc_entry):
    entries = [*two_datasets, voc_entry]
    dataset = load(entries)
    assert dataset.sizes == [5, 3, 1]  # image b is empty
    # VOC counts pixels from 1: 5, 6, 20, 26 -> 4, 5, 19, 25.
    assert packed_truth(dataset, 8) == [("couch", [4, 5, 15, 20])]
    val = load(entries, "val")
    assert val.sizes == [5, 3, 2]
    label = val.metainfo["classes"].index
    assert val[8]["data_samples"].ground_truth == [
        dict(bbox=[4, 5, 15, 20], label=label("couch"), area=300, iscrowd=0),
        dict(bbox=[4, 5, 15, 20], label=label("cat"), area=300, iscrowd=1),
    ]
    voc_entry["classes"] = ["sofa"]
    val = load([voc_entry], "val")
    assert val.metainfo["classes"] == ("couch",)
    assert [r["label"] for r in val[0]["data_samples"].ground_truth] == [0]


@pytest.fixture
def concat_entry(make_coco_dataset, tmp_path):
    """Two COCO files with the same classes in opposite orders as one dataset."""
    one = make_coco_dataset(tmp_path / "one", classes=["dog", "cat"], num_images=2)
    two = make_coco_dataset(tmp_path / "two", classes=["cat", "dog"], num_images=3)
    sources = [
        dict(
            type="CocoDataset",
            data_root=entry["data_root"],
            ann_file="train.json",
            data_prefix=dict(img="images/"),
            metainfo=dict(classes=("cat", "dog")),
        )
        for entry in (one, two)
    ]
    concat = dict(type="ConcatDataset", datasets=sources)
    return dict(name="pets", train=concat, val=concat), [one, two]


def test_classes_may_be_in_a_file(concat_entry, tmp_path):
    entry, _ = concat_entry
    source = entry["train"]["datasets"][0]
    source["metainfo"]["classes"] = str(tmp_path / "names.txt")
    entry = dict(name="pets", train=source, val=source)
    with pytest.raises(ConfigError, match=r"classes='.*names.txt' names no file"):
        MixtureDataset(datasets=[entry], pipeline=LOAD)
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    dataset = MixtureDataset(datasets=[entry], pipeline=LOAD)
    assert dataset.metainfo["classes"] == ("cat", "dog")


def test_concat_of_two_coco_files_labels_by_name(two_datasets, concat_entry):
    pets, files = concat_entry
    dataset = load([two_datasets[0], pets])
    assert dataset.sizes == [5, 5]
    found = [packed_truth(dataset, index) for index in range(5, 10)]
    assert found[:2] == [file_truth(files[0], i) for i in range(2)]
    assert found[2:] == [file_truth(files[1], i) for i in range(3)]
    assert dataset[9]["data_samples"].dataset_name == "pets"


def test_datasets_of_a_concat_follow_the_split(concat_entry, edit_json):
    pets, files = concat_entry

    def change(document):
        document["annotations"][0].update(iscrowd=1, area=3)
        document["images"].append(
            dict(id=9, file_name="0.png", width=48, height=32)  # without boxes
        )

    edit_json(files[0]["data_root"] + "train.json", change)
    assert load([pets]).sizes == [5]
    val = load([pets], "val")
    assert val.sizes == [6]
    first = val[0]["data_samples"].ground_truth[0]
    assert (first["iscrowd"], first["area"]) == (1, 3)
    outside = dict(bbox=[90, 0, 5, 5])
    path = files[1]["data_root"] + "train.json"
    edit_json(path, lambda d: d["annotations"][0].update(outside))
    with pytest.raises(DataError, match=r"dataset 'pets': .*two/train\.json: annot"):
        load([pets])
    load([pets], on_bad_box="drop")


# --- pipelines of single datasets -----------------------------------------------------


def half_size(results):
    """A pipeline that a test can tell from the mixture's."""
    results["img"] = results["img"][::2, ::2]
    results["img_shape"] = results["img"].shape[:2]
    return results


def test_data_root_of_an_entry_holds_for_a_dataset_config(two_datasets):
    street = two_datasets[0]
    classes = ("car", "person", "bus")
    config = dict(type="CocoDataset", ann_file="train.json")
    street["train"] = dict(config, metainfo=dict(classes=classes))
    assert packed_truth(load(two_datasets), 0) == file_truth(street, 0)


def test_own_pipeline_of_a_dataset_replaces_the_mixtures(two_datasets, concat_entry):
    pets, _ = concat_entry
    for config in pets["train"]["datasets"]:
        config["pipeline"] = [*LOAD, half_size, PIPELINE[-1]]
    dataset = load([*two_datasets, pets])
    shapes = [
        tuple(sample["inputs"].shape[1:])
        for sample in map(dataset.__getitem__, range(13))
    ]
    assert shapes == [(32, 48)] * 8 + [(16, 24)] * 5
    assert dataset[8]["data_samples"].dataset_name == "pets"


def test_cached_mosaic_mixes_images_of_one_dataset(two_datasets):
    mosaic = dict(type="CachedMosaic", img_scale=(32, 32), max_cached_images=8)
    pipeline = [*LOAD, mosaic, PIPELINE[-1]]
    dataset = load(two_datasets, pipeline=pipeline)
    seen = {"street": set(), "park": set()}
    for index in [*range(8)] * 3:
        data = dataset[index]["data_samples"]
        seen[data.dataset_name].update(data.gt_instances.labels.tolist())
    assert data.img_shape == (64, 64)  # four images of 32 x 32
    # car, person, bus, dog: street has no dog and park no bus.
    assert seen == {"street": {0, 1, 2}, "park": {0, 1, 3}}


# --- faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "fault"),
    [
        (dict(type="Resise"), "unknown transform 'Resise'; did you mean 'Resize'"),
        (
            dict(
                type="RandomChoice", transforms=[[dict(type="Resize", scal=(24, 16))]]
            ),
            "transform Resize: .*'scal'; did you mean 'scale'",
        ),
        (dict(type="RandomCrop"), "RandomCrop: missing a required argument: 'crop_siz"),
    ],
)
def test_misspelt_transforms_are_named(two_datasets, transform, fault):
    with pytest.raises(ConfigError, match=f"'street', train: .*{fault}"):
        load(two_datasets, pipeline=[*LOAD, transform])


def test_scores_of_training_images_are_without_their_augmentation(concat_entry):
    """An entry's own pipeline of training would move pixels, and not the truth."""
    pets, _ = concat_entry
    first = pets["train"]["datasets"][0]
    flip = [*LOAD, dict(type="RandomFlip", prob=1.0), dict(type="PackDetInputs")]
    entry = dict(name="pets", train=dict(first, pipeline=flip))
    shown = load([entry], test_mode=True)[0]["inputs"]
    assert torch.equal(load([entry])[0]["inputs"], shown.flip(-1))


def test_configs_that_cannot_be_are_refused(two_datasets, voc_entry, concat_entry):
    trained = MixtureDataset(datasets=two_datasets).metainfo
    pets, _ = concat_entry
    first, second = pets["train"]["datasets"]
    several = dict(pets["train"], datasets=[dict(first, pipeline=PIPELINE), second])
    mosaic = [dict(type="Mosaic", img_scale=(32, 32))]
    mixed = dict(type="MultiImageMixDataset", dataset=pets["train"], pipeline=mosaic)
    lost = dict(voc_entry["train"], ann_file="VOC2007/nothing.txt")
    cases = {
        "'voc': no image .* has a box of .'dog'": (voc_entry, dict(classes=["dog"])),
        r"'voc': .*nothing\.txt'?. Correct data_root": (voc_entry, dict(train=lost)),
        "'pets': the datasets inside of train have d": (pets, dict(train=several)),
        "'pets': a mixture does not run the pipeline of MultiIm": (
            pets,
            dict(train=mixed),
        ),
    }
    for message, (entry, changes) in cases.items():
        with pytest.raises((ConfigError, DataError), match=message):
            load([{**entry, "rename": {}, **changes}])
    with pytest.raises(ConfigError, match="no dataset 'streets'; did you mean 'street"):
        load([dict(two_datasets[0], name="streets")], label_space=trained)


def test_a_failing_pipeline_names_the_dataset(two_datasets, monkeypatch):
    with pytest.raises(ConfigError, match=r"has to end with dict.type='Pack"):
        load(two_datasets, pipeline=LOAD)[0]
    logged = []
    monkeypatch.setattr(
        "damex.datasets.mixture.print_log", lambda text, **_: logged.append(text)
    )
    broken = [LOAD[0], lambda results: results["no such key"]]
    with pytest.raises(KeyError, match="no such key"):  # with its traceback
        load(two_datasets, pipeline=broken)[0]
    assert "'street': the train pipeline failed on " in logged[-1]
    assert "0.png" in logged[-1]


def test_a_rejected_image_gives_way_to_the_next_in_training_only(two_datasets):
    dataset = load(two_datasets, pipeline=[Refuse({4, 7}), *PIPELINE])
    # 4 is the last image of street, 7 the last one of park.
    assert dataset[4]["data_samples"].sample_idx == 0
    assert dataset[4]["data_samples"].dataset_name == "street"
    assert dataset[7]["data_samples"].sample_idx == 5
    every = [Refuse(set(range(8))), *PIPELINE]
    with pytest.raises(DataError, match=r"refused .* and 3 other images of it\."):
        load(two_datasets, pipeline=every, max_refetch=3)[0]
    with pytest.raises(DataError, match=r"refused .*'park' and 2 other images of it"):
        load(two_datasets, pipeline=every)[6]
    with pytest.raises(DataError, match=r"the val pipeline refused .*0\.png of .*'str"):
        load(two_datasets, "val", pipeline=[Refuse({0}), *PIPELINE])[0]


def test_classes_that_a_label_file_leaves_out(two_datasets, voc_entry):
    """Their boxes are not read, whatever the format."""
    datasets = dict(park=dict(dog=None, car="auto"), voc=dict(sofa=None))
    content = dict(version=1, datasets=datasets)
    entries = [*two_datasets, {**voc_entry, "rename": {}}]
    found = load(entries, label_space=content, filter_empty=False)
    classes = found.metainfo["classes"]
    assert classes[:4] == ("car", "person", "bus", "auto")
    labels = [
        {classes[i["bbox_label"]] for i in found.get_data_info(k)["instances"]}
        for k in range(len(found))
    ]
    assert set().union(*labels[5:8]) == {"person", "auto"}
    assert labels[8:] == [{"cat"}, set()]


# --- augmentation is a function of the place in the run -------------------------------


def batches(entries, num_workers, disturb):
    """Pixels, boxes and flips of one epoch."""
    dataset = load(entries, pipeline=FLIP)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=MixtureSampler(dataset, seed=0, samples_per_epoch=24),
        num_workers=num_workers,
        collate_fn=pseudo_collate,
    )
    np.random.seed(disturb)
    torch.manual_seed(disturb)
    return [
        (pixels, sample.gt_instances.bboxes.tensor.clone(), torch.tensor(sample.flip))
        for batch in loader
        for pixels, sample in zip(batch["inputs"], batch["data_samples"], strict=True)
    ]


def test_augmentation_does_not_depend_on_workers_or_global_seeds(two_datasets):
    alone = batches(two_datasets, 0, 0)
    assert {bool(flip) for _, _, flip in alone} == {False, True}
    for workers, disturb in ((0, 1), (2, 2)):
        other = batches(two_datasets, workers, disturb)
        assert len(other) == len(alone) == 24
        for pair in zip(alone, other, strict=True):
            assert all(map(torch.equal, *pair))


def draw():
    """One number from each of the three global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("fails", [False, True])
def test_a_local_seed_repeats_and_restores_all_generators(fails):
    with local_seed(1):  # keeps this test itself from changing the global state
        undisturbed, found = [], []
        for draws, seeds in ((undisturbed, ()), (found, (5, 5, 6))):
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            draws.append(draw())
            local = []
            for seed in seeds:
                with contextlib.suppress(KeyError), local_seed(seed):
                    local.append(draw())
                    if fails:
                        raise KeyError
            draws.append(draw())
        assert found == undisturbed
        first, second, third = local
        assert first == second
        assert all(a != b for a, b in zip(first, third, strict=True))
