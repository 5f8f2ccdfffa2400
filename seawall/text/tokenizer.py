"""The tokenizer of a model folder: text to ids and back, its begin and end ids, its chat template.

It owns a `tokenizers` backend (Rust) and a few small tables, is read-only after `load`, and may be
used by several threads at once. It is not transformers' AutoTokenizer: only `tokenizer.json` is
read, and what the backend's decoder says is the text (no clean-up of spaces afterwards).
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from seawall.core.errors import ConfigError, RequestError
from seawall.text.chat import ChatTemplates

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_ID = 2**32 - 1  # the backend's ids are unsigned 32-bit numbers


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other bytes in order for the characters
    from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Begin and end of text, gathered from the folder's files."""

    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]


class Tokenizer:
    """See the module; make one with `Tokenizer.load(folder)`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialIds, templates: ChatTemplates
    ) -> None:
        # A request is never cut or filled silently, whatever the file asks for.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special = special
        self._templates = templates
        self._special_contents = frozenset(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        )
        self._byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder.

        Raises:
            ConfigError: no tokenizer.json, or a file in the folder that cannot be read.
        """
        backend = _read_backend(folder / "tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json")
        tokens = _special_tokens(settings, _read_json(folder / "special_tokens_map.json"))
        special = _special_ids(folder, backend, tokens)
        templates = ChatTemplates(
            _template_sources(folder, settings),
            {name: token for name, token in tokens.items() if token is not None},
        )
        return cls(backend, special, templates)

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """The begin token; None for a model that has none."""
        return self._special.bos_id

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end token, the one that separates documents."""
        return self._special.eos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation, ascending."""
        return self._special.eos_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template; None if it has none."""
        return self._templates.default_source

    @property
    def num_special_tokens(self) -> int:
        """How many tokens `encode` adds to a text by the tokenizer's template."""
        return self._backend.num_special_tokens_to_add(False)

    @property
    def is_byte_level(self) -> bool:
        """Whether each token is a fixed string of bytes and a text their UTF-8."""
        return self._byte_level

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the tokens its template adds (RequestError if it is no Unicode)."""
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """`encode` of each text, in parallel where the machine has cores for it."""
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of ids; ids that the vocabulary does not hold have none.

        `spaces_between_special_tokens=False` drops the space that some decoders (not byte-level
        ones) put between two special tokens in a row.

        Raises:
            RequestError: an id that is negative or does not fit 32 bits.
        """
        if ids and (min(ids) < 0 or max(ids) > _MAX_ID):
            raise RequestError(f"ids: {min(ids)}..{max(ids)} is outside 0..{_MAX_ID}")
        if spaces_between_special_tokens or skip_special_tokens or self._byte_level:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        parts: list[list[int]] = [[]]
        after_special = False
        for token_id in filter(self.knows, ids):
            special = self.is_special(token_id)
            if special and after_special:
                parts.append([])
            parts[-1].append(token_id)
            after_special = special
        return "".join(self._backend.decode(part, skip_special_tokens=False) for part in parts)

    def knows(self, token_id: int) -> bool:
        """Whether the vocabulary holds the id."""
        return self._backend.id_to_token(token_id) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special token, one that plain text cannot produce by itself."""
        return self._backend.id_to_token(token_id) in self._special_contents

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary; empty for an id it does not hold."""
        assert self._byte_level, "token_bytes: the vocabulary is not byte-level"
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return token.encode()

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads inside a sentence, its leading space included.

        A token that is half a character reads as U+FFFD; an id without a token is "".
        """
        if self._byte_level:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        anchored = self._backend.decode([*self._anchor, token_id], skip_special_tokens=False)
        before = self._backend.decode(self._anchor, skip_special_tokens=False)
        return anchored.removeprefix(before)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; it holds its special tokens, so encode it without.

        Args:
            messages: mappings with `role`, `content` and what else the template reads.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: function descriptions, where the template knows them.
            variables: further names that the template reads (`enable_thinking`, ...).

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        return self._templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables or {},
        )

    @functools.cached_property
    def _anchor(self) -> list[int]:
        # Decoders that drop the space of a text's first token keep it after this one.
        return self._backend.encode("a", add_special_tokens=False).ids


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text: character {error.start} is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}), which no tokenizer can encode; send valid Unicode"
        ) from error


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f"no tokenizer.json in {path.parent}; pass skip_tokenizer_init=True and send "
            "input_ids, or convert the tokenizer with the `hf` extra (pip install seawall[hf])"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class, for every kind of bad file
        raise ConfigError(
            f"{path} is no tokenizer that tokenizers {tokenizers.__version__} can read ({error}); "
            "fetch the file again, or upgrade tokenizers"
        ) from error


def _read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object; fetch it again")
    return value


def _special_tokens(
    settings: Mapping[str, object], token_map: Mapping[str, object]
) -> dict[str, str | None]:
    """Named special tokens; None where a file says that the model has none."""
    merged = {**token_map, **settings}
    return {name: _content(merged[name]) for name in _SPECIAL_NAMES if name in merged}


def _content(token: object) -> str | None:
    """A token is written as its text or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _special_ids(
    folder: Path, backend: tokenizers.Tokenizer, tokens: Mapping[str, str | None]
) -> SpecialIds:
    generation = _read_json(folder / "generation_config.json")
    config = _read_json(folder / "config.json")
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    eos_token = _token_id(backend, tokens.get("eos_token"))
    ends = {
        *_ids(generation.get("eos_token_id")),
        *_ids(config.get("eos_token_id")),
        *(() if eos_token is None else (eos_token,)),
    }
    configured = _ids(config.get("eos_token_id")) or _ids(generation.get("eos_token_id"))
    # A tokenizer that names its begin token, or names none, knows better than the model's config:
    # Qwen's configs carry an id that its tokenizer never puts in front of a text.
    if "bos_token" in tokens:
        bos_id = _token_id(backend, tokens["bos_token"])
    else:
        begins = _ids(generation.get("bos_token_id")) or _ids(config.get("bos_token_id"))
        bos_id = begins[0] if begins else None
    return SpecialIds(
        bos_id=bos_id,
        eos_id=eos_token if eos_token is not None else next(iter(configured), None),
        eos_ids=tuple(sorted(ends)),
    )


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(value: object) -> list[int]:
    """Configs give one id, a list of ids, or null."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _template_sources(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Templates by name: a file of its own wins over the settings, as in Hugging Face folders."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    found = settings.get("chat_template")
    if found is None:
        found = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    sources: dict[str, str] = {}
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            sources[str(entry.get("name"))] = entry["template"]
    return sources
