"""What reaches the screen: warnings that a user can act on, and progress."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quiet_screen"]

# Said by mmengine and mmdet about their own code; a user can do nothing about them.
UPSTREAM_MESSAGES = (
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
)
UPSTREAM_WARNINGS = (r"torch\.meshgrid: in an upcoming release",)


def quiet_screen(logger: logging.Logger) -> None:
    """Leave warnings and errors on the screen; the log file keeps every line.

    Args:
        logger: A logger with stream and file handlers.
    """
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(max(handler.level, logging.WARNING))
            handler.addFilter(_is_for_users)
    for pattern in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


def _is_for_users(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(text in message for text in UPSTREAM_MESSAGES)
