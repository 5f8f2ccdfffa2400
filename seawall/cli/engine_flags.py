"""Flags made from tables: engine arguments from `core.config.ARGS`, sampling from SamplingParams.

Nothing here knows an argument by name (except the model itself), so that Python and the command
line cannot drift apart. A flag that was not given leaves no trace, so the engine's defaults stay
in one place. Ranges and choices are checked where Python's are: by the table.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from seawall.cli.command import UsageError
from seawall.core.config import ARGS, Arg, EngineArgs, EngineConfig
from seawall.core.errors import ConfigError, RequestError
from seawall.core.params import SamplingParams
from seawall.core.units import human_bytes, parse_bytes

MODEL_PATH = "model_path"
_ENGINE_PREFIX = "engine."
_SAMPLING_PREFIX = "sampling."
_METAVARS = {"int": "N", "float": "X", "bytes": "SIZE", "str": "TEXT"}
_SAMPLING_HELP = {
    "max_new_tokens": "most tokens to write; 0 only reads the prompt (default: 128)",
    "min_new_tokens": "no end of text before so many tokens",
    "temperature": "0 is greedy (default: 1.0)",
    "top_p": "keep the best ids with this much probability together",
    "top_k": "keep the k best ids; -1 keeps all",
    "min_p": "keep ids with at least this share of the best one's probability",
    "frequency_penalty": "taken off a logit for each time its token was written",
    "presence_penalty": "taken off a logit whose token was written",
    "repetition_penalty": "divides logits of tokens seen in prompt or output",
    "stop": "text that ends the output; may be given several times",
    "stop_token_ids": "token id that ends the output; may be given several times",
    "n": "samples of each prompt",
    "ignore_eos": "do not stop at the end-of-text token",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "set special tokens off with spaces",
    "no_stop_trim": "leave what stopped the output in the text",
    "logit_bias": "added to the logit of a token id; may be given several times",
    "sampling_seed": "makes the draws repeatable",
    "json_schema": "write JSON that a schema accepts; @FILE reads it from a file",
    "regex": "write a match of a regular expression",
    "ebnf": "write what rules in Lark or EBNF notation allow; @FILE reads them from a file",
    "choice": "write one of some texts; given once for each",
    "structural_tag": "write free text with tags that JSON describes; @FILE reads it from a file",
}


def size(text: str) -> int:
    """A size in bytes, for argparse."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def bias(text: str) -> tuple[str, float]:
    """ID=NUMBER, for argparse."""
    token, _, value = text.partition("=")
    if not token.isdecimal() or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=NUMBER, such as 42=-1.5")
    return token, float(value)


_KINDS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bytes": size,
    "str": str,
}
_LISTS: Mapping[str, Callable[[str], Any]] = {
    "stop": str,
    "stop_token_ids": int,
    "logit_bias": bias,
    "choice": str,
}
_LIST_METAVARS = {
    "stop": "TEXT",
    "stop_token_ids": "ID",
    "logit_bias": "ID=X",
    "choice": "TEXT",
}
_FROM_FILES = ("json_schema", "ebnf", "structural_tag")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument(
        _ENGINE_PREFIX + MODEL_PATH,
        metavar="MODEL",
        help="'demo' for the embedded model, or a Hugging Face folder",
    )


def add_engine_flags(parser: argparse.ArgumentParser, *, model_flag: bool = False) -> None:
    """One flag for each engine argument; `--model-path` only if the model is no positional."""
    group = parser.add_argument_group("engine arguments")
    for arg in ARGS:
        if arg.name != MODEL_PATH or model_flag:
            _add_engine_flag(group, arg)


def _add_engine_flag(group: argparse._ArgumentGroup, arg: Arg) -> None:
    flag, dest = _flag(arg.name), _ENGINE_PREFIX + arg.name
    text = _help(arg)
    if arg.kind == "bool":
        _add_switch(group, flag, dest, text, is_on=arg.default is True)
        return
    group.add_argument(
        flag,
        dest=dest,
        type=_KINDS[arg.kind],
        default=argparse.SUPPRESS,
        metavar=_METAVARS[arg.kind],
        help=text,
    )


def _add_switch(
    group: argparse._ArgumentGroup, flag: str, dest: str, text: str, *, is_on: bool
) -> None:
    """`--flag` for what is off by default; for what is on, `--no-flag` too."""
    if is_on:
        group.add_argument(
            flag,
            dest=dest,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        group.add_argument(
            flag, dest=dest, action="store_true", default=argparse.SUPPRESS, help=text
        )


def _help(arg: Arg) -> str:
    parts = [arg.help]
    if len(arg.choices) > 1:
        parts.append("one of " + ", ".join(str(choice) for choice in arg.choices))
    if isinstance(arg.default, int) and arg.kind == "bytes":
        parts.append(f"default: {human_bytes(arg.default)}")
    elif arg.default is not None and arg.kind != "bool":
        parts.append(f"default: {arg.default}")
    elif arg.default is True:
        parts.append("default: on")
    return "; ".join(parts).replace("%", "%%")


def engine_args(arguments: argparse.Namespace) -> EngineArgs:
    """The engine arguments that were given, the model's path among them.

    Raises:
        UsageError: the table refuses one.
    """
    given = _given(arguments, _ENGINE_PREFIX)
    try:
        EngineConfig.from_args(given)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return cast("EngineArgs", given)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each sampling parameter."""
    group = parser.add_argument_group("sampling parameters")
    for parameter in fields(SamplingParams):
        flag, dest = _flag(parameter.name), _SAMPLING_PREFIX + parameter.name
        text = _SAMPLING_HELP[parameter.name]
        if parameter.type is bool:
            _add_switch(group, flag, dest, text, is_on=parameter.default is True)
        elif parameter.default == ():
            group.add_argument(
                flag,
                dest=dest,
                action="append",
                type=_LISTS[parameter.name],
                default=argparse.SUPPRESS,
                metavar=_LIST_METAVARS[parameter.name],
                help=text,
            )
        else:
            kind = _kind(parameter.type)
            group.add_argument(
                flag,
                dest=dest,
                type=_KINDS[kind],
                default=argparse.SUPPRESS,
                metavar=_METAVARS[kind],
                help=text,
            )


def _kind(annotation: object) -> str:
    """The kind of a parameter of one value."""
    if annotation is float:
        return "float"
    return "str" if annotation == str | None else "int"


def sampling_params(arguments: argparse.Namespace) -> dict[str, object]:
    """The sampling parameters that were given.

    Raises:
        UsageError: one is out of range.
    """
    given = _given(arguments, _SAMPLING_PREFIX)
    pairs = given.get("logit_bias")
    if isinstance(pairs, list):
        given["logit_bias"] = dict(pairs)
    for name in _FROM_FILES:
        text = given.get(name)
        if isinstance(text, str) and text.startswith("@"):
            given[name] = _content(name, Path(text[1:]))
    try:
        SamplingParams.parse(given)
    except RequestError as error:
        raise UsageError(str(error)) from None
    return given


def _content(name: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{name}: {error}") from None


def _given(arguments: argparse.Namespace, prefix: str) -> dict[str, object]:
    return {
        name.removeprefix(prefix): value
        for name, value in vars(arguments).items()
        if name.startswith(prefix)
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def positive(text: str) -> int:
    """A whole number above zero, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, the least is 1")
    return value


def natural(text: str) -> int:
    """A whole number, zero included, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {value}, the least is 0")
    return value


def naturals(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, for argparse."""
    return tuple(natural(part) for part in text.split(","))
