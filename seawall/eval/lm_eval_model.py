"""The model `seawall` of lm-evaluation-harness: its requests, run by an `Engine` in this process.

Owns the engine. How texts become tokens, how long ones are cut into windows and where answers end
follows the harness's transformers model (`hf`), so that scores can be compared; what it computes
with is the engine's public surface. It is the only module that imports `lm_eval`.

    requests --encode--> rows of ids --sort--> Engine.generate --original order--> answers

The engine gets all rows at once and makes its own batches, so `batch_size` means nothing here. Rows
are sorted so that those with a common beginning find it in the prefix cache. Rows of the very same
context come in rounds: one that starts in the same step as its neighbour would find nothing yet.

    contexts A B C with options 1 2 3:   A1 B1 C1  A2 B2 C2  A3 B3 C3
"""

import itertools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, TypeVar, Unpack, cast

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from seawall.core.config import EngineArgs
from seawall.core.errors import ConfigError, EngineError, RequestError
from seawall.offline.engine import Engine
from seawall.text.tokenizer import Tokenizer

logger = logging.getLogger("seawall.eval")

Answer = tuple[float, bool]
Message = dict[str, Any]
T = TypeVar("T")

# Bounds the results that are held as Python objects and, with --use_cache, what a crash can lose;
# far more than run at a time, so that the engine is idle between two calls for a moment only.
_CALL_SIZE = 8192
# What the harness seeds everything else with; a run repeats unless told otherwise.
_RANDOM_SEED = 1234
# What the harness passes when nothing is said: the device is then the engine's choice.
_HARNESS_DEVICE = "cuda:0"


class HarnessArgs(TypedDict, total=False):
    """Arguments that the harness knows; see `Settings` for those that are not self-evident."""

    batch_size: int | str | None
    max_batch_size: int | None
    max_length: int | None
    max_gen_toks: int
    add_bos_token: bool | None
    prefix_token_id: int | None
    think_end_token: str | None
    chat_template_args: Mapping[str, object]


class ModelArgs(HarnessArgs, EngineArgs, total=False):
    """Everything that `--model_args` takes beside `pretrained`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What concerns this adapter and not the engine.

    Attributes:
        max_gen_toks: tokens to write at most where a task does not say.
        add_bos_token: whether texts get the tokenizer's special tokens; None leaves it to its
            template.
        prefix_token_id: stands before a text that has nothing before it; None takes the begin
            token, else the end token.
        think_end_token: an answer begins after the last of these.
        chat_template_args: further names for the chat template (`enable_thinking`, ...).
    """

    max_gen_toks: int = 256
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    think_end_token: str | None = None
    chat_template_args: Mapping[str, object] = field(default_factory=dict)


@register_model("seawall")
class SeawallLM(TemplateLM):
    """An engine behind the harness's interface.

    Args:
        pretrained: "demo", a Hugging Face folder or id.
        args: the engine's arguments by their names, and those of `HarnessArgs`. `max_length` is
            another name of `context_length`.

    Raises:
        ConfigError, BudgetError, ModelError: as `Engine`.
    """

    def __init__(self, pretrained: str, **args: Unpack[ModelArgs]) -> None:
        super().__init__()
        given: dict[str, Any] = {"random_seed": _RANDOM_SEED, **args}
        given.pop("batch_size", None)
        given.pop("max_batch_size", None)
        if given.get("device") == _HARNESS_DEVICE:
            del given["device"]
        own = {f.name: given.pop(f.name) for f in fields(Settings) if f.name in given}
        self._settings = Settings(**own)
        engine_args = _engine_args(given)
        name = engine_args.get("tokenizer_path") or pretrained
        self._tokenizer_name = str(name).replace("/", "__")
        self.engine = Engine(pretrained, **engine_args)
        # The harness has no call that ends a model: the engine goes with it, or at exit.
        self._shutdown = weakref.finalize(self, self.engine.shutdown)
        self._info = self.engine.get_server_info()

    def close(self) -> None:
        """Give the engine's memory back; a second call does nothing."""
        self._shutdown()

    # -- what the harness asks about the model -------------------------------------------------

    @property
    def max_length(self) -> int:
        """Longest sequence, all of it counted: context, and what is scored or written after it."""
        return min(int(self._info["context_length"]), int(self._info["max_total_num_tokens"]))

    @property
    def max_gen_toks(self) -> int:
        """Tokens to write at most where a task does not say."""
        return self._settings.max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token = self._text.eos_id
        if token is None:
            raise RequestError("tokenizer: it has no end token; give prefix_token_id")
        return token

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        if self._settings.prefix_token_id is not None:
            return self._settings.prefix_token_id
        begin = self._text.bos_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's cache of requests."""
        return self._tokenizer_name

    def get_model_info(self) -> dict[str, object]:
        """What the harness writes beside its results."""
        return {
            "model_dtype": self._info["dtype"],
            "model_context_length": self.max_length,
            "model_random_seed": self._info["random_seed"],
        }

    # -- text ----------------------------------------------------------------------------------

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Ids of a text; one that brings its begin token along does not get another."""
        if add_special_tokens is None:
            begin = self._text.decode([self.prefix_token_id], skip_special_tokens=False)
            wanted = self._settings.add_bos_token is not False
            add_special_tokens = wanted and not (begin and string.startswith(begin))
        return self._text.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation; without a prompt, the last message stays open."""
        try:
            return self._render(chat_history, add_generation_prompt)
        except RequestError as error:
            kept = [message for message in chat_history if message["role"] != "system"]
            if len(kept) == len(chat_history):
                raise
            logger.warning("%s; trying again without the system message", error)
            return self._render(kept, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text that the harness records: none, as the engine keeps its template compiled.

        Raises:
            RequestError: a template is asked for by name.
        """
        if isinstance(chat_template, str):
            raise RequestError(
                f"apply_chat_template: got {chat_template!r}, only the model's default template is "
                "used; give no name"
            )
        return "" if chat_template else None

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        text = self._text.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=self._settings.chat_template_args,
        )
        return text if add_generation_prompt else _open_end(text, str(messages[-1]["content"]))

    @property
    def _text(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ConfigError("skip_tokenizer_init: got True, but tasks are text; leave it out")
        return tokenizer

    # -- scores --------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[Answer]:
        """(logprob, is greedy) of (key for the cache, context ids, continuation ids)."""
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        starts = [
            len(row) - len(continuation)
            for row, (_, _, continuation) in zip(rows, requests, strict=True)
        ]
        num_cut = sum(
            len(row) < len(context) + len(continuation)
            for row, (_, context, continuation) in zip(rows, requests, strict=True)
        )
        if num_cut:
            logger.warning(
                "%d of %d contexts were cut from the left to %d tokens in all",
                num_cut,
                len(rows),
                self.max_length,
            )

        def answers(chosen: Sequence[int]) -> list[Answer]:
            found = self.engine.generate(
                input_ids=[rows[i] for i in chosen],
                sampling_params={"max_new_tokens": 0, "temperature": 0},
                return_logprob=True,
                logprob_start_len=[starts[i] for i in chosen],
                top_logprobs_num=1,
                progress=not disable_tqdm,
            )
            made = [_answer(result) for result in found]
            for i, answer in zip(chosen, made, strict=True):
                key = requests[i][0]
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
            return made

        return self._in_order(answers, rows, starts)

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        """Context and continuation; a context that is too long loses its beginning."""
        if not continuation:
            raise RequestError("continuation: it adds no token to its context; give more text")
        if len(continuation) >= self.max_length:
            raise RequestError(
                f"continuation: got {len(continuation)} tokens, context_length "
                f"{self.max_length} holds {self.max_length - 1} after a context; raise it"
            )
        return [*context, *continuation][-self.max_length :]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Logprob of each whole text; one longer than the context is scored in windows."""
        texts = [str(request.args[0]) for request in requests]
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                # One token of each window is context only.
                max_seq_len=self.max_length - 1,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        parts: list[list[float]] = [[] for _ in texts]
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (logprob, _) in zip(owners, answers, strict=True):
            parts[owner].append(logprob)
        totals = [math.fsum(part) for part in parts]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    # -- generation ----------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to a stop string or the end token."""
        params = [self._sampling(request.args[1]) for request in requests]
        rows = [
            self._prompt(str(request.args[0]), int(param["max_new_tokens"]))
            for request, param in zip(requests, params, strict=True)
        ]
        end = self._text.decode([self.eot_token_id], skip_special_tokens=False)

        def answers(chosen: Sequence[int]) -> list[str]:
            found = self.engine.generate(
                input_ids=[rows[i] for i in chosen],
                sampling_params=[params[i] for i in chosen],
                progress=not disable_tqdm,
            )
            made = []
            for i, result in zip(chosen, found, strict=True):
                _check_ended(result)
                text = str(
                    postprocess_generated_text(
                        generation=result["text"],
                        stop=[*params[i]["stop"], end],
                        think_end_token=self._settings.think_end_token,
                    )
                )
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
                made.append(text)
            return made

        return self._in_order(answers, rows, [len(row) for row in rows])

    def _in_order(
        self,
        work: Callable[[Sequence[int]], list[T]],
        rows: Sequence[list[int]],
        starts: Sequence[int],
    ) -> list[T]:
        """`work` on the numbers of rows, in the order of `_rounds`; its results by number."""
        # Half of the pool for contexts that wait for their next round, half for what runs.
        order = _rounds(rows, starts, int(self._info["max_total_num_tokens"]) // 2)
        results: dict[int, T] = {}
        for at in range(0, len(order), _CALL_SIZE):
            chosen = order[at : at + _CALL_SIZE]
            results.update(zip(chosen, work(chosen), strict=True))
        return [results[i] for i in range(len(rows))]

    def _sampling(self, gen_kwargs: Mapping[str, object]) -> dict[str, Any]:
        """Sampling parameters from a task's; names that the engine does not know are refused."""
        params: dict[str, Any] = {**normalize_gen_kwargs({**gen_kwargs}, self.max_gen_toks)}
        params["max_new_tokens"] = params.pop("max_gen_toks")
        params["stop"] = [text for text in params.pop("until") if text]
        if not params.pop("do_sample"):
            params["temperature"] = 0.0
        # Some tasks spell out that they want no beam search.
        if params.get("num_beams") == 1:
            del params["num_beams"]
        return params

    def _prompt(self, context: str, max_new_tokens: int) -> list[int]:
        room = self.max_length - max_new_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks: got {max_new_tokens}, context_length is {self.max_length}; "
                "ask for fewer or raise it"
            )
        return self.tok_encode(context)[-room:]


def main() -> None:
    """The harness's command line; this module has registered its model by being imported."""
    cli_evaluate()


def _engine_args(given: dict[str, Any]) -> EngineArgs:
    """What is left for the engine; it checks names and values itself."""
    length = given.pop("max_length", None)
    if length is not None:
        if given.get("context_length") is not None:
            raise ConfigError(
                f"max_length and context_length: got {length} and {given['context_length']}, they "
                "name the same limit; give one"
            )
        given["context_length"] = length
    return cast("EngineArgs", given)


def _rounds(rows: Sequence[list[int]], starts: Sequence[int], room: int) -> list[int]:
    """Numbers of rows in the order in which the prefix cache serves them best.

    Rows are sorted by their ids; those with the same ids before `start` are a group. Groups that
    fit together into `room` tokens of the cache go in rounds, one row of each at a time.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(range(len(rows)), key=rows.__getitem__):
        groups.setdefault(tuple(rows[i][: starts[i]]), []).append(i)
    order: list[int] = []
    block: list[list[int]] = []
    used = 0
    for context, group in groups.items():
        size = len(context) + sum(len(rows[i]) - starts[i] for i in group)
        if used + size > room:
            order += _interleaved(block)
            block, used = [], 0
        block.append(group)
        used += size
    return order + _interleaved(block)


def _interleaved(groups: Sequence[Sequence[int]]) -> list[int]:
    return [i for row in itertools.zip_longest(*groups) for i in row if i is not None]


def _answer(result: Mapping[str, Any]) -> Answer:
    _check_ended(result)
    meta = result["meta_info"]
    entries = meta["input_token_logprobs"]
    best = [top[0][1] for top in meta["input_top_logprobs"]]
    ids = [entry[1] for entry in entries]
    return math.fsum(entry[0] for entry in entries), best == ids


def _check_ended(result: Mapping[str, Any]) -> None:
    reason = result["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        raise EngineError(f"request {result['meta_info']['id']}: {reason['message']}")


def _open_end(text: str, content: str) -> str:
    """The rendered text up to the end of the last message, without what closes its turn."""
    kept = content.strip()
    at = text.rfind(kept)
    if at < 0:
        raise RequestError(
            f"messages: the chat template leaves out the last one ({content[:40]!r}), which is to "
            "be continued; end with a message of the user"
        )
    end = at + len(kept)
    spaces = content[len(content.rstrip()) :]
    return text[: end + len(spaces)] if text.startswith(spaces, end) else text[:end]
