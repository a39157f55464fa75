"""The config and processes of the headroom ladder's tests."""

from tests.test_headroom.conftest import config, run_python  # noqa: F401
