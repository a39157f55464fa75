from __future__ import annotations

import itertools
import json

import pytest

from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError

STREET = DatasetSpec("street", classes=("car", "person", "bus"))
PARK = DatasetSpec("park", classes=("person", "dog", "car"))


def test_union_merges_equal_names_in_order_of_appearance():
    space = LabelSpace.from_specs([STREET, PARK])
    assert space.classes == ("car", "person", "bus", "dog")
    assert space.num_classes == 4
    assert space.valid_labels(0) == [0, 1, 2]
    assert space.valid_labels(1) == [0, 1, 3]


@pytest.mark.parametrize("own", list(itertools.permutations(PARK.own_classes)))
def test_labels_go_by_name_for_any_order_of_own_classes(own):
    space = LabelSpace.from_specs([STREET, PARK])
    labels = space.local_to_global(1, own)
    assert [space.classes[label] for label in labels] == list(own)


def test_partitioned_keeps_equal_names_apart():
    space = LabelSpace.from_specs([STREET, PARK], mode="partitioned")
    assert space.classes == (
        *("street/car", "street/person", "street/bus"),
        *("park/person", "park/dog", "park/car"),
    )
    # car is 0 in street and 5 in park.
    assert space.local_to_global(0, ["car"]) == [0]
    assert space.local_to_global(1, ["car"]) == [5]
    assert space.valid_labels(1) == [3, 4, 5]


def test_rename_merges_across_datasets():
    zoo = DatasetSpec("zoo", classes=("auto", "lion"), rename=dict(auto="car"))
    space = LabelSpace.from_specs([STREET, zoo])
    assert space.classes == ("car", "person", "bus", "lion")
    assert space.local_to_global(1, ["lion", "auto"]) == [3, 0]


def test_rename_merges_within_a_dataset():
    spec = DatasetSpec("a", classes=("van", "truck", "cat"), rename=dict(van="truck"))
    space = LabelSpace.from_specs([spec])
    assert space.classes == ("truck", "cat")
    assert space.local_to_global(0, ["van", "truck", "cat"]) == [0, 0, 1]
    assert space.valid_labels(0) == [0, 1]


def test_rename_may_swap_two_names():
    spec = DatasetSpec("a", classes=("l", "r"), rename=dict(l="r", r="l"))
    space = LabelSpace.from_specs([spec, DatasetSpec("b", classes=("l", "r"))])
    assert space.classes == ("r", "l")
    assert space.local_to_global(0, ["l", "r"]) == [0, 1]
    assert space.local_to_global(1, ["l", "r"]) == [1, 0]


def test_groups_are_numbered_by_their_first_dataset():
    specs = [
        DatasetSpec("a", classes=("x",), group="night"),
        DatasetSpec("b", classes=("x",)),
        DatasetSpec("c", classes=("x",), group="night"),
    ]
    space = LabelSpace.from_specs(specs)
    assert space.group_names == ("night", "b")
    assert [space.group_id(i) for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("mode", ["union", "partitioned"])
def test_metainfo_survives_json(mode):
    space = LabelSpace.from_specs([STREET, PARK], mode=mode)
    stored = json.loads(json.dumps(space.to_metainfo()))
    assert LabelSpace.from_metainfo(stored) == space


def test_rename_of_an_unknown_class_is_refused_with_a_suggestion():
    spec = DatasetSpec("a", classes=("person", "bus"), rename=dict(persn="human"))
    with pytest.raises(ConfigError, match="'a': rename names the class 'persn'; did y"):
        LabelSpace.from_specs([spec])


def test_unknown_mode():
    with pytest.raises(ConfigError, match=r"label_space must be one of .* got 'join'"):
        LabelSpace.from_specs([STREET], mode="join")


def test_unknown_dataset_is_refused_with_a_suggestion():
    space = LabelSpace.from_specs([STREET, PARK])
    assert space.dataset_id("park") == 1
    with pytest.raises(ConfigError, match="no dataset 'prak'; did you mean 'park'"):
        space.dataset_id("prak")


def test_class_outside_of_the_label_space_names_the_dataset():
    space = LabelSpace.from_specs([STREET, PARK])
    # dog is a class of the mixture but not of street.
    with pytest.raises(ConfigError, match="'street': class 'dog' is not in the label"):
        space.local_to_global(0, ["car", "dog"])
