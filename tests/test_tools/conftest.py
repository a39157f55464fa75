"""The config of the tests of headroom."""

from tests.test_headroom.conftest import config  # noqa: F401
