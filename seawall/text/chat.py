"""Chat templates of model folders, rendered in a sandbox; tokenizes nothing.

A template is a program that came with the weights: it runs in jinja2's immutable sandbox, sees
only what it is given, and every way in which it fails is the caller's RequestError.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from seawall.core.errors import ConfigError, RequestError


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body (called by jinja2)."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """The named templates of one model, compiled once.

    Args:
        sources: template text by name; "default", and "tool_use" where a model has one for tools.
        special_tokens: what templates may call by name: bos_token, eos_token, ...
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateError as error:
                raise ConfigError(
                    f"chat template {name!r} is not valid jinja2 ({_one_line(error)}); repair "
                    "chat_template.jinja or tokenizer_config.json in the model folder"
                ) from error

    @property
    def default_source(self) -> str | None:
        """Text of the template that plain messages go through; None if there is none."""
        return self._sources.get("default")

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> str:
        """The prompt text; RequestError if there is no template or it refuses the messages."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt, or add "
                "chat_template.jinja to the model folder"
            )
        values = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(values)
        # What a template trips over in the caller's messages is named by Python, not by jinja2.
        except (TemplateError, TypeError, ValueError, LookupError, OverflowError) as error:
            raise RequestError(
                f"messages: the chat template refused them: {_one_line(error)}"
            ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own: that one escapes for HTML, and a prompt is not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
