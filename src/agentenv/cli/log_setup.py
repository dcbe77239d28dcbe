"""Logging of the server: everything to standard error, ours and the libraries', in one form.

Standard output stays free for the one line that says where the server listens.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import structlog

_NOISY = ("asyncio", "aiohttp.access", "uvicorn.access", "uvicorn.error")


def set_up_logging(level: Literal["debug", "info", "warning", "error"]) -> None:
    """Send structlog and the standard library's logging to standard error: for people on a terminal, else as JSON."""
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    renderer: list[Any]
    if sys.stderr.isatty():
        renderer = [
            # The default one prints the values of local variables, secrets among them.
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        ]
    else:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
