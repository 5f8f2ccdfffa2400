"""`seawall serve`: an HTTP server over one engine, until it is told to end."""

import argparse
import importlib
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from seawall import __version__
from seawall.cli.command import DONE, CommandError
from seawall.cli.engine_flags import engine_args
from seawall.cli.serve_arguments import server_values
from seawall.core.config import EngineConfig

if TYPE_CHECKING:
    from seawall.server.options import ServerOptions
    from seawall.server.service import Service

# A server must refuse at some point; scripts of `Engine` may queue what they like.
MAX_QUEUED = 10_000


def run(arguments: argparse.Namespace) -> int:
    """Serve."""
    args: dict[str, object] = {**engine_args(arguments)}
    values = server_values(arguments)
    args.setdefault("max_queued_requests", MAX_QUEUED)
    if "logprobs_mode" in args:
        values["logprobs_mode"] = args["logprobs_mode"]
    level = EngineConfig.from_args(args).log_level
    return _serve(values, args, level)


def _serve(values: Mapping[str, object], args: Mapping[str, object], level: str) -> int:
    try:
        options = vars(importlib.import_module("seawall.server.options"))["ServerOptions"](**values)
        parts = vars(importlib.import_module("seawall.server.run"))
    except ModuleNotFoundError as error:
        raise CommandError(
            f"serve needs the package {error.name}; pip install 'seawall[server]'"
        ) from None
    set_up_log(options, level)
    started = time.perf_counter()

    def on_ready(url: str, service: "Service") -> None:
        engine = service.engine
        sys.stdout.write(
            f"{engine.plan_table}\n\n"
            f"Ready in {time.perf_counter() - started:.1f} s: {service.model_name} at {url}\n"
        )
        sys.stdout.flush()

    parts["run"](parts["HttpServer"](options, "seawall.engine", args, __version__, on_ready))
    return DONE


def set_up_log(options: "ServerOptions", level: str) -> None:
    """One line an event on stderr; prompts and keys are never logged."""
    handler = logging.StreamHandler()
    if options.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("seawall", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)
