"""Structured logs: JSON lines on standard error, or lines for people on a terminal."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure() -> None:
    """Set structlog up for this process; `ANABRANCH_LOG` is the level (default `info`)."""
    level = logging.getLevelNamesMapping().get(os.environ.get("ANABRANCH_LOG", "info").upper(), logging.INFO)
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
