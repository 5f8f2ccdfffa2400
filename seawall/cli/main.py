"""`seawall`: finds the subcommand, reads its arguments, runs it, and turns errors into exit codes.

    0 done    1 failed    2 wrong usage    130 interrupted

Errors are one line on stderr. A subcommand's module is imported after its arguments were read.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from seawall import __version__
from seawall.cli import arguments, serve_arguments
from seawall.cli.command import DONE, FAILED, INTERRUPTED, USAGE, Command, UsageError
from seawall.core.errors import BudgetError, SeawallError

COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        help="see it work: plan, score, write, and balance the books",
        description="Runs the embedded model inside a small budget, and shows what became of it.",
        add_arguments=arguments.demo,
        run="seawall.cli.demo:run",
    ),
    "generate": Command(
        help="write on from prompts",
        description="Writes on from prompts given as arguments or as JSON lines.",
        add_arguments=arguments.generate,
        run="seawall.cli.generate:run",
    ),
    "score": Command(
        help="logprobs of texts, or of options after a context",
        description="Scores a file of JSON lines, or options after a context.",
        add_arguments=arguments.score,
        run="seawall.cli.score:run",
    ),
    "plan": Command(
        help="the memory plan of a model, from its config.json alone",
        description="Prints the memory plan that an engine would start with. Loads nothing.",
        add_arguments=arguments.plan,
        run="seawall.cli.plan:run",
    ),
    "doctor": Command(
        help="check this installation and this machine",
        description="Checks Python, packages, memory and the numbers of the embedded model.",
        add_arguments=arguments.doctor,
        run="seawall.cli.doctor:run",
    ),
    "bench offline": Command(
        help="throughput on random prompts, with peak memory by line",
        description="Measures an offline engine. The last line on stdout is one JSON object.",
        add_arguments=arguments.bench_offline,
        run="seawall.cli.bench:run_offline",
    ),
    "bench compare": Command(
        help="side by side with transformers on this CPU (needs the extra hf)",
        description="Runs each system in its own process, one after another, on the same work.",
        add_arguments=arguments.bench_compare,
        run="seawall.cli.bench:run_compare",
    ),
    "bench logits": Command(
        help="logprobs of rows with and without the logits matrix: time, bytes, error",
        description="Measures each way on the same rows. The last line on stdout is one JSON.",
        add_arguments=arguments.bench_logits,
        run="seawall.cli.bench_logits:run",
    ),
    "bench memory": Command(
        help="peaks against the plan, growth, and the speed of the prefix tree",
        description="Needs no tokenizer. The last line on stdout is one JSON object.",
        add_arguments=arguments.bench_memory,
        run="seawall.cli.bench_memory:run",
    ),
    "bench serving": Command(
        help="latency and throughput of a running server, with Poisson arrivals",
        description="Measures a running server. The last line on stdout is one JSON object.",
        add_arguments=serve_arguments.bench_serving,
        run="seawall.cli.bench_serving:run",
    ),
    "serve": Command(
        help="HTTP server: OpenAI's API, SGLang's, and live memory",
        description="Serves one model over HTTP until it is told to end (Ctrl-C or SIGTERM).",
        add_arguments=serve_arguments.serve,
        run="seawall.cli.serve:run",
    ),
    "top": Command(
        help="live memory of a running server, in the terminal",
        description="Draws plan, now and peak of each account of a running server.",
        add_arguments=serve_arguments.top,
        run="seawall.cli.top:run",
    ),
    "launch_server": Command(
        help="the same, with the model as --model-path",
        description="`seawall serve` with the arguments of `python -m sglang.launch_server`.",
        add_arguments=serve_arguments.launch,
        run="seawall.cli.serve:run",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as an exception, so that it ends like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except UsageError as error:
        return _fail(str(error), USAGE)
    except BudgetError as error:
        sys.stderr.write(f"{error.table}\n" if error.table else "")
        return _fail(str(error), FAILED)
    except SeawallError as error:
        return _fail(str(error), FAILED)
    except BrokenPipeError:
        # Whoever read stdout has gone; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except OSError as error:
        return _fail(_os_error(error), FAILED)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return DONE if words else USAGE
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"seawall {__version__}\n")
        return DONE
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        sys.stdout.write(f"usage: seawall COMMAND [arguments]\n\n{_table(group)}")
        return DONE if len(words) > 1 else USAGE
    name, rest = _split(words, group)
    command = COMMANDS[name]
    parser = _Parser(prog=f"seawall {name}", description=command.description, allow_abbrev=False)
    command.add_arguments(parser)
    try:
        parsed = parser.parse_intermixed_args(rest)
    except SystemExit as help_was_printed:
        return int(help_was_printed.code or DONE)
    module, _, function = command.run.partition(":")
    code = vars(importlib.import_module(module))[function](parsed)
    sys.stdout.flush()
    return int(code)


def _split(words: list[str], group: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one or two words, and what follows it."""
    if words[0] in COMMANDS:
        return words[0], words[1:]
    pair = " ".join(words[:2])
    if pair in COMMANDS:
        return pair, words[2:]
    known = ", ".join(group or COMMANDS)
    raise UsageError(f"unknown command {pair if group else words[0]!r}; choose one of {known}")


def _overview() -> str:
    return (
        "usage: seawall COMMAND [arguments]\n\n"
        "LLM inference and scoring inside a planned, proven memory budget.\n\n"
        f"{_table(list(COMMANDS))}\n"
        "seawall COMMAND --help shows a command's arguments; seawall --version the version.\n"
    )


def _table(names: list[str]) -> str:
    width = max(len(name) for name in names)
    return "".join(f"  {name.ljust(width)}  {COMMANDS[name].help}\n" for name in names)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"seawall: {message}\n")
    return code


def _os_error(error: OSError) -> str:
    named = Path(str(error.filename)).name if error.filename is not None else ""
    where = f"{named}: " if named else ""
    return f"{where}{error.strerror or error}; check the path and its permissions"


if __name__ == "__main__":
    sys.exit(main())
