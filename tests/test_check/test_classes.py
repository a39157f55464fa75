"""Names that are perhaps two spellings of one."""

import pytest

from damex.workbench.check.classes import similar_names, why_near


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("caf\u00e9", "cafe\u0301", "unicode"),
        ("\uff23ar", "Car", "unicode"),
        ("Caf\u00e9s", "cafe\u0301", "plural"),
        ("Car", "car", "case"),
        ("traffic_light", "Traffic Light", "spaces"),
        ("t-shirt", "tshirt", "spaces"),
        ("car", "cars", "plural"),
        ("box", "Boxes", "plural"),
        ("berry", "berries", "plural"),
        ("motorbike", "motorcycle", "synonym"),
        ("aeroplane", "airplane", "synonym"),
        ("tvmonitor", "tv", "synonym"),
        ("pottedplant", "potted plant", "spaces"),
        ("diningtable", "dining table", "spaces"),
        ("Sofas", "couch", "synonym"),
        ("umbrela", "umbrella", "spelling"),
        ("giraffe", "girafe", "spelling"),
        ("zebra", "zabra", "spelling"),
        ("tiger", "itger", "spelling"),
    ],
)
def test_near_names(first, second, why):
    assert why_near(first, second) == why
    assert why_near(second, first) == why


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cat", "car"),  # short words differ by a letter all the time
        *[("bus", "bush"), ("car", "cart"), ("glass", "glas"), ("c1", "c11")],
        ("class1", "class2"),
        ("speed limit 30", "speed limit 80"),
        ("giraffe", "giarfef"),
        ("person", "parsnip"),
        ("horse", "house fly"),
        ("bicycle", "motorcycle"),
    ],
)
def test_names_that_are_not_near(first, second):
    assert why_near(first, second) is None
    assert why_near(second, first) is None


def test_pairs_of_a_list():
    assert similar_names(["car", "sofa", "cars", "couch", "car"]) == [
        ("car", "cars", "plural"),
        ("sofa", "couch", "synonym"),
    ]
