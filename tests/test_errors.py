import math

import numpy as np
import pytest

from damex.errors import (
    RANGES,
    ConfigError,
    check_choice,
    check_number,
    check_sizes,
    did_you_mean,
    printable,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *[("plain Ä, 猫 and 🐈\tto a\u200b\nline",) * 2],
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\rb\x9b2J", r"a\x0db\x9b2J"),
        ("gnp.\u202eexe\u2028", r"gnp.\u202eexe\u2028"),
        ("\udcff\ud800", r"\xff\ud800"),  # not UTF-8 in a file name; in JSON
    ],
)
def test_controls_of_a_terminal_are_escaped(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("name", "known", "limit", "text"),
    [
        ("persn", ["car", "person"], 20, "did you mean 'person'? It has: car, person."),
        # difflib alone finds nothing between "TV" and "tv".
        ("TV", ["tv", "bus"], 20, "did you mean 'tv'? It has: tv, bus."),
        ("zebra", ["car", "bus"], 20, "it has: car, bus."),
        ("x", ["aa", "bb", "cc"], 2, "it has: aa, bb, ...."),
        ("cc", ["aa", "bb", "ccc"], 2, "did you mean 'ccc'? It has: aa, bb, ...."),
        ("x", [], 20, "it has: nothing."),
    ],
)
def test_suggests_the_nearest_name_and_lists_known_ones(name, known, limit, text):
    assert did_you_mean(name, known, limit=limit) == text


@pytest.mark.parametrize("expected", RANGES)
@pytest.mark.parametrize("value", [math.nan, "fast", [1.0], True])
def test_what_is_not_a_number_is_in_no_range(expected, value):
    with pytest.raises(ConfigError, match=r"Gate: rate must be .*, got "):
        check_number("Gate", expected, rate=value)


def test_numbers_of_numpy_and_none_are_allowed():
    check_number("Gate", "in (0, 1]", rate=np.float32(0.5), other=None, whole=1)
    check_sizes("Gate", k=np.int64(2))


@pytest.mark.parametrize("size", [1.5, "two", None, True, math.nan])
def test_a_size_is_an_integer(size):
    with pytest.raises(ConfigError, match="Gate: k must be an integer of 1 or"):
        check_sizes("Gate", k=size)


@pytest.mark.parametrize("value", ["c", None, ["a"]])
def test_a_choice_is_one_of_its_names(value):
    with pytest.raises(ConfigError, match=r"unknown noise .*use one of .'a', 'b'"):
        check_choice("Gate", {"a": 1, "b": 2}, noise=value)
