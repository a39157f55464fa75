from __future__ import annotations

import math

import numpy as np
import pytest

from damex.errors import (
    RANGES,
    ConfigError,
    DataError,
    check_choice,
    check_number,
    check_sizes,
    did_you_mean,
)


def test_suggests_the_nearest_name_and_lists_all():
    text = did_you_mean("persn", ["car", "person"])
    assert text == "did you mean 'person'? It has: car, person."


def test_suggests_across_letter_case():
    # difflib alone finds nothing between "TV" and "tv".
    assert did_you_mean("TV", ["tv", "bus"]).startswith("did you mean 'tv'? ")
    assert "mean 'TopKGate'?" in did_you_mean("Topk", ["DenseSoftmaxGate", "TopKGate"])


def test_keeps_quiet_when_nothing_is_near():
    assert did_you_mean("zebra", ["car", "bus"]) == "it has: car, bus."


def test_lists_at_most_limit_names():
    assert did_you_mean("x", ["aa", "bb", "cc"], limit=2) == "it has: aa, bb, ...."
    assert did_you_mean("x", ["aa", "bb"], limit=2) == "it has: aa, bb."


def test_says_when_there_is_nothing_to_choose_from():
    assert did_you_mean("x", []) == "it has: nothing."


def test_suggests_a_name_beyond_the_limit():
    names = [f"thing{i:03}" for i in range(50)]
    assert "did you mean 'thing049'?" in did_you_mean("thing049x", names)


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_errors_are_value_errors(kind):
    assert issubclass(kind, ValueError)


@pytest.mark.parametrize("expected", RANGES)
@pytest.mark.parametrize("value", [math.nan, "fast", [1.0], True])
def test_what_is_not_a_number_is_in_no_range(expected, value):
    with pytest.raises(ValueError, match=r"Gate: rate must be .*, got "):
        check_number("Gate", expected, rate=value)


def test_numbers_of_numpy_and_none_are_allowed():
    check_number("Gate", "in (0, 1]", rate=np.float32(0.5), other=None, whole=1)
    check_sizes("Gate", k=np.int64(2))


@pytest.mark.parametrize("size", [1.5, "two", None, True, math.nan])
def test_a_size_is_an_integer(size):
    with pytest.raises(ValueError, match="Gate: k must be an integer, got"):
        check_sizes("Gate", k=size)


@pytest.mark.parametrize("value", ["c", None, ["a"]])
def test_a_choice_is_one_of_its_names(value):
    with pytest.raises(ValueError, match=r"Gate: unknown noise .*use one of .'a', 'b'"):
        check_choice("Gate", {"a": 1, "b": 2}, noise=value)
