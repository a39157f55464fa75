import io
import logging

import pytest

from damex.engine.screen import quiet_screen


@pytest.fixture
def logger(tmp_path):
    log = logging.Logger("test")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    log.addHandler(logging.FileHandler(tmp_path / "log.txt"))
    quiet_screen(log)
    return log


def test_the_screen_shows_warnings_and_the_file_everything(logger, tmp_path):
    logger.info("one of hundreds of lines")
    logger.warning("a box was dropped")
    logger.warning('"FileClient" will be deprecated in future.')
    screen = logger.handlers[0].stream.getvalue()
    assert screen == "a box was dropped\n"
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3
