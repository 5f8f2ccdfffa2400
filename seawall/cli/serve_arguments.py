"""Arguments of `seawall serve`, `top` and `bench serving`. Imports no library of the server."""

import argparse
from collections.abc import Callable

from seawall.cli.command import UsageError
from seawall.cli.engine_flags import (
    add_engine_flags,
    add_model,
    natural,
    positive,
    size,
)

_PREFIX = "server."


def seconds(text: str) -> float:
    """A time above zero, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, a time above 0 is needed")
    return value


# option -> kind, metavar, help; the defaults are ServerOptions' own
_OPTIONS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "host": (str, "ADDRESS", "where to listen (default: 127.0.0.1)"),
    "port": (natural, "N", "0 takes a free one (default: 30000)"),
    "served_model_name": (str, "NAME", "what /v1/models says (default: MODEL)"),
    "api_key": (str, "KEY", "clients must send it as 'Authorization: Bearer KEY'"),
    "admin_api_key": (str, "KEY", "the same for routes that change the engine"),
    "max_body_bytes": (size, "SIZE", "largest request body (default: 32MiB)"),
    "max_header_bytes": (size, "SIZE", "largest request line and headers (default: 64KiB)"),
    "bodies_bytes": (size, "SIZE", "all bodies that are being read (default: 256MiB)"),
    "results_bytes": (size, "SIZE", "logprobs on their way to clients (default: 1GiB)"),
    "header_seconds": (seconds, "X", "for a request's headers to arrive (default: 10)"),
    "body_seconds": (seconds, "X", "for its body (default: 60)"),
    "write_seconds": (seconds, "X", "a reader may make an answer wait so long (default: 60)"),
    "drain_seconds": (seconds, "X", "open requests go on after SIGTERM (default: 25)"),
    "hang_seconds": (seconds, "X", "a silent engine process is restarted after (default: 120)"),
    "max_logprobs": (natural, "K", "most alternatives a position on /v1/* (default: 20)"),
}


def serve(parser: argparse.ArgumentParser) -> None:
    """`seawall serve`."""
    add_model(parser)
    add_server_flags(parser)
    add_engine_flags(parser)


def launch(parser: argparse.ArgumentParser) -> None:
    """`python -m seawall.launch_server`: the same with --model-path."""
    add_server_flags(parser)
    add_engine_flags(parser, model_flag=True)


def top(parser: argparse.ArgumentParser) -> None:
    """`seawall top`."""
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="of a running server (default: http://127.0.0.1:30000)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="X", help="seconds (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print once and end")


def bench_serving(parser: argparse.ArgumentParser) -> None:
    """`seawall bench serving`."""
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:30000",
        metavar="URL",
        help="of a running server (default: http://127.0.0.1:30000)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    parser.add_argument(
        "--num-prompts", type=positive, default=256, metavar="N", help="requests (default: 256)"
    )
    parser.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="X",
        help="a second, Poisson; inf sends all at once (default: inf)",
    )
    parser.add_argument("--random-input-len", type=positive, default=256, metavar="N")
    parser.add_argument("--random-output-len", type=positive, default=64, metavar="N")
    parser.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R")
    parser.add_argument(
        "--vocab-size", type=positive, default=1000, metavar="N", help="ids drawn (default: 1000)"
    )
    parser.add_argument("--seed", type=natural, default=1, metavar="N")
    for name in ("ttft", "itl", "e2e"):
        parser.add_argument(
            f"--goodput-{name}", type=seconds, metavar="X", help=f"goal for {name}, seconds"
        )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each option of the server."""
    group = parser.add_argument_group("server arguments")
    for name, (kind, metavar, text) in _OPTIONS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=_PREFIX + name,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=text,
        )
    group.add_argument(
        "--cors-origin",
        dest=_PREFIX + "cors_origins",
        action="append",
        default=argparse.SUPPRESS,
        metavar="ORIGIN",
        help="web pages of this origin may call; may be given several times",
    )
    group.add_argument(
        "--incremental-streaming-output",
        dest=_PREFIX + "incremental_streaming_output",
        action="store_true",
        default=argparse.SUPPRESS,
        help="streams of /generate carry what is new instead of all",
    )
    group.add_argument(
        "--no-generation-config",
        dest=_PREFIX + "use_generation_config",
        action="store_false",
        default=argparse.SUPPRESS,
        help="no sampling defaults of the model's folder on /v1/*",
    )
    group.add_argument(
        "--log-format",
        dest=_PREFIX + "log_format",
        choices=("text", "json"),
        default=argparse.SUPPRESS,
        help="of the server's log (default: text)",
    )


def server_values(arguments: argparse.Namespace) -> dict[str, object]:
    """The options that were given.

    Raises:
        UsageError: a port that is none.
    """
    given = {
        name.removeprefix(_PREFIX): value
        for name, value in vars(arguments).items()
        if name.startswith(_PREFIX)
    }
    if isinstance(given.get("cors_origins"), list):
        given["cors_origins"] = tuple(given["cors_origins"])
    port = given.get("port", 0)
    if isinstance(port, int) and port > 65535:
        raise UsageError(f"--port: got {port}, the most is 65535")
    return given
