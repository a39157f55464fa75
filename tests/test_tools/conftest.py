"""The config and processes of the tests of headroom."""

from tests.test_headroom.conftest import config, run_python  # noqa: F401
