"""Every metric, log event and span of the dispatcher, in one place."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from typing import Any, Literal

import structlog


class Event(Enum):
    """Every log event: its name, its level, what it means. The name is a promise to log searches."""

    # Adapters add theirs here, a line each: NAME = ("event-name", logging.LEVEL, "What it means")

    def __init__(self, event: str, level: int, meaning: str) -> None:
        self.event = event
        self.level = level
        self.meaning = meaning


_logger = structlog.get_logger("dispatcher")


def emit(event: Event, **fields: Any) -> None:
    """Log an event with its fields. Never a secret among them: settings redact theirs."""
    _logger.log(event.level, event.event, **fields)


def configure_logging(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Set up logging for the process: console on a terminal, one JSON object a line otherwise."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
