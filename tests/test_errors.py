from __future__ import annotations

import pytest

from damex.errors import ConfigError, DataError, did_you_mean


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
