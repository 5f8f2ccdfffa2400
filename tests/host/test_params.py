"""Bad input: each is refused with one line that has the value, the limit and the fix."""

import math
import re
from typing import Any

import numpy as np
import pytest

from seawall.core.config import ARGS, EngineConfig
from seawall.core.errors import ConfigError, RequestError
from seawall.core.params import LogprobSpec, RequestLimits, SamplingParams, resolve_max_new
from seawall.offline.inputs import InputReader

LIMITS = RequestLimits(
    vocab_size=100, context_length=64, max_total_tokens=48, max_top_k=30, max_token_ids=8
)
IDS = [1, 2, 3, 4]


def reader(limits: RequestLimits = LIMITS) -> InputReader:
    return InputReader(None, limits, "processed", 0)


def refusal(input_ids: Any = IDS, *, prompt: Any = None, **options: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(RequestError) as caught:
        reader().read(prompt, input_ids, options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250
    return message


def params_refusal(**params: Any) -> str:
    return refusal(sampling_params=params)


@pytest.mark.parametrize(
    ("input_ids", "said"),
    [
        ([], "got 0 tokens, the least is 1; give"),
        ([[1], []], "got 0 tokens, the least is 1; give"),
        ([1, 100], r"got id 100, the vocabulary is \[0, 100\); tokenise"),
        ([-1, 1], r"got id -1, the vocabulary is \[0, 100\); tokenise"),
        ([10**20], "got id 100000000000000000000, the vocabulary"),
        ([1] * 49, "got 49 tokens, max_total_tokens is 48; shorten the prompt or raise"),
        ([1, 2.5], "got 2.5 in the list, integers are needed"),
        ([1, True], "got True in the list, integers are needed"),
        ([1, None], "got None in the list, integers are needed"),
        ([1, [2]], r"got \[2\] in the list, integers are needed"),
        ("text", "got str; give a list of token ids"),
        (7, "got int; give a list of token ids"),
        (np.array([1.5]), "got 1.5 in the list"),
    ],
)
def test_bad_prompts(input_ids: Any, said: str) -> None:
    assert re.search(said, refusal(input_ids))


def test_prompt_over_the_context() -> None:
    limits = RequestLimits(
        vocab_size=100, context_length=64, max_total_tokens=640, max_top_k=30, max_token_ids=8
    )
    with pytest.raises(RequestError, match=r"got 65 tokens, context_length is 64; shorten"):
        reader(limits).read(None, [1] * 65, {})
    assert reader(limits).read(None, [1] * 64, {}).requests[0].max_new_tokens == 0


def test_prompt_or_ids() -> None:
    assert "got both; give exactly one" in refusal(prompt="x")
    assert "got neither; give exactly one" in refusal(None)
    assert "skip_tokenizer_init is set; give input_ids" in refusal(None, prompt="text")
    assert "got int; give a string or a list" in refusal(None, prompt=3)
    assert "got list; give a string or a list" in refusal(None, prompt=["a", 3])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ],
)
def test_numbers_must_be_finite(name: str, value: float) -> None:
    assert params_refusal(**{name: value}) == f"{name}: got {value}, a finite number is needed"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -0.1, "got -0.1, the range is [0,"),
        ("top_p", 0, "got 0, it must be above 0; 1 turns it off"),
        ("top_p", 1.1, "got 1.1, the range is [0, 1]; change it"),
        ("top_p", -0.5, "got -0.5, the range is [0, 1]; change it"),
        ("min_p", 2, "got 2.0, the range is [0, 1]; change it"),
        ("top_k", -2, "got -2, the least is -1 (off); give"),
        ("top_k", 1.5, "got 1.5, an integer is needed"),
        ("frequency_penalty", 3, "got 3.0, the range is [-2, 2]; change it"),
        ("presence_penalty", -3, "got -3.0, the range is [-2, 2]; change it"),
        ("repetition_penalty", 0, "got 0, it must be above 0; 1 turns it off"),
        ("repetition_penalty", -1, "got -1.0, the range is [1e-06, 2]; change it"),
        ("repetition_penalty", 1e-40, "got 1e-40, the range is [1e-06, 2]; change it"),
        ("temperature", 10**400, "got an integer beyond any float; lower it"),
        ("logit_bias", {"1": 1e39}, "got 1e+39, the range is [-1e+30, 1e+30]; change it"),
        ("max_new_tokens", -1, "got -1, the range is [0,"),
        ("max_new_tokens", "5", "got '5', an integer is needed"),
        ("max_new_tokens", True, "got True, an integer is needed"),
        ("min_new_tokens", -1, "got -1, the range is [0,"),
        ("n", 0, "got 0, the range is [1, 4096]; change it"),
        ("n", 5000, "got 5000, the range is [1, 4096]; change it"),
        ("sampling_seed", 2**63, "the range is [-9223372036854775808, 9223372036854775807]"),
        ("sampling_seed", 0.5, "got 0.5, an integer is needed"),
        ("ignore_eos", 1, "got 1, true or false is needed"),
        ("stop", 5, "got 5, a string or a list of strings is needed"),
        ("stop", ["a", ""], "got an empty string, which would stop at once; remove it"),
        ("stop", ["a"] * 65, "got 65 strings of 65 characters, the limits are 64 and 4096"),
        ("stop", "x" * 5000, "got 1 strings of 5000 characters, the limits are 64 and 4096"),
        ("stop_token_ids", "12", "got '12', a list of token ids is needed"),
        ("stop_token_ids", [1, "2"], "got '2', an integer is needed"),
        ("stop_token_ids", [100], "got id 100, the vocabulary is [0, 100); use ids"),
        ("logit_bias", [1], "got [1], a mapping of token id to number is needed"),
        ("logit_bias", {"a": 1}, "got key 'a', a token id is needed"),
        ("logit_bias", {"-1": 1}, "got key '-1', a token id is needed"),
        ("logit_bias", {"1": math.nan}, "got nan, a finite number is needed"),
        ("logit_bias", {"100": 1}, "got id 100, the vocabulary is [0, 100); use ids"),
    ],
)
def test_values_out_of_range(name: str, value: object, said: str) -> None:
    message = params_refusal(**{name: value})
    assert message.startswith(f"{name}: ")
    assert said in message


def test_names_nobody_knows_and_features_not_built() -> None:
    assert "unknown name 'temprature'" in params_refusal(temprature=1)
    for name in ("stop_regex", "beam_width"):
        assert params_refusal(**{name: "x"}).startswith(f"{name}: not built yet")
    assert "not supported; leave it out" in params_refusal(stream_interval=2)
    # What changes nothing is let through.
    assert SamplingParams.parse({"regex": None, "stream_interval": 1}) == SamplingParams()
    assert "got list; give a mapping" in refusal([IDS], sampling_params=[[1]])
    assert "got 2 values for 1 prompts; give one for each" in refusal(
        [IDS], sampling_params=[{}, {}]
    )


def test_lengths_that_do_not_go_together() -> None:
    said = params_refusal(max_new_tokens=45)
    assert said == (
        "max_new_tokens: got 45 after a prompt of 4 tokens, max_total_tokens is 48; "
        "ask for at most 44"
    )
    assert "got 9, max_new_tokens is 8; lower" in params_refusal(min_new_tokens=9, max_new_tokens=8)
    assert "got 45, max_new_tokens is 44 when not given; give" in params_refusal(min_new_tokens=45)
    assert "got 2 with max_new_tokens 0" in params_refusal(n=2, max_new_tokens=0)
    assert "stop: strings need a tokenizer" in params_refusal(stop="x")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("logprob_start_len", 5, "got 5, the prompt has 4 tokens; give a position inside"),
        ("logprob_start_len", -2, "got -2, the least is -1 (outputs only)"),
        ("logprob_start_len", 1.0, "got 1.0, an integer is needed"),
        ("top_logprobs_num", 31, "got 31, the limit is 30 (vocabulary 100, logits_workspace); ask"),
        ("top_logprobs_num", -1, "got -1, the least is 0; give the count"),
        ("top_logprobs_num", "3", "got '3', an integer is needed"),
        ("token_ids_logprob", [100], "got id 100, the vocabulary is [0, 100); use ids"),
        ("token_ids_logprob", [-1], "got id -1, the vocabulary is [0, 100); use ids"),
        ("token_ids_logprob", list(range(9)), "got 9 ids, the limit is 8; ask for fewer or raise"),
        ("token_ids_logprob", "5", "got '5', a list of token ids is needed"),
        ("logprobs_mode", "both", "got 'both'; choose 'raw' or 'processed'"),
        ("return_logprob", 1, "got 1, true or false is needed"),
        ("return_text_in_logprobs", "yes", "got 'yes', true or false is needed"),
        ("rid", "", "got '', a string is needed"),
        ("rid", 5, "got 5, a string is needed"),
        ("priority", "high", "got 'high', an integer is needed"),
        ("extra_key", 5, "got 5, a string is needed"),
    ],
)
def test_options(option: str, value: object, said: str) -> None:
    message = refusal(**{"return_logprob": True, option: value})
    assert message.startswith(f"{option}: ")
    assert said in message


def test_options_by_prompt() -> None:
    two = [IDS, IDS]
    assert "got one for 2 prompts; give a list" in refusal(two, rid="a")
    assert "they must differ; give each its own" in refusal(two, rid=["a", "a"])
    assert "got 1 values for 2 prompts" in refusal(two, return_logprob=[True])
    # A list for a single prompt is not a batch of one.
    assert "give one for each" in refusal(IDS, return_logprob=[True])
    call = reader().read(
        None,
        two,
        {
            "return_logprob": [True, False],
            "logprob_start_len": [0, None],
            "top_logprobs_num": [2, None],
            "token_ids_logprob": [None, [3]],
            "priority": [0, 4],
            "extra_key": [None, "b"],
            "sampling_params": [None, {"max_new_tokens": 3}],
        },
    )
    first, second = call.requests
    assert first.logprob == LogprobSpec(wanted=True, start_len=0, top_k=2)
    assert second.logprob == LogprobSpec()
    assert (first.max_new_tokens, second.max_new_tokens) == (44, 3)
    assert (second.priority, second.extra_key) == (4, "b")


def test_the_edges_are_let_through() -> None:
    call = reader().read(
        None,
        [0, 99, 1, 2],
        {
            "return_logprob": True,
            "logprob_start_len": 4,
            "top_logprobs_num": 30,
            "token_ids_logprob": [0, 99],
            "sampling_params": {
                "max_new_tokens": 44,
                "min_new_tokens": 44,
                "temperature": 0,
                "top_p": 1,
                "top_k": 1000,
                "logit_bias": {99: -5, "0": 2},
                "stop_token_ids": [99],
                "sampling_seed": -(2**63),
            },
        },
    )
    request = call.requests[0]
    assert request.sampling.logit_bias == ((0, 2.0), (99, -5.0))
    assert request.seed == -(2**63)
    assert reader().read(None, np.array([[1, 2], [3, 4]]), {}).is_batch
    assert resolve_max_new(SamplingParams(), 4, LIMITS) == 44


def test_seeds_are_drawn_in_order_of_arrival() -> None:
    seeds = [reader().read(None, [IDS, IDS], {}).requests[i].seed for i in (0, 1)]
    again = reader()
    assert [again.read(None, IDS, {}).requests[0].seed for _ in (0, 1)] == seeds
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"page_sise": 4}, "unknown name 'page_sise'"),
        ({"page_size": 0}, "page_size: got 0, the least is 1; raise it"),
        ({"page_size": 4096}, "page_size: got 4096, the most is 1024; lower it"),
        ({"page_size": "4"}, "page_size: got '4', a value of kind int is needed"),
        ({"page_size": True}, "page_size: got True, a value of kind int is needed"),
        ({"page_size": None}, "page_size: got None, a value is needed (default 16)"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size: got 0, give 1 or more, or -1"),
        ({"chunked_prefill_size": -2}, "chunked_prefill_size: got -2, the least is -1"),
        ({"schedule_conservativeness": math.nan}, "schedule_conservativeness: got nan"),
        ({"schedule_conservativeness": 1.5}, "got 1.5, the most is 1.0; lower it"),
        ({"schedule_policy": "random"}, "got 'random', not built or unknown; use 'fcfs'"),
        ({"tp_size": 2}, "tp_size: got 2, not built or unknown; use 1"),
        ({"device": "npu"}, "device: got 'npu', not built or unknown; use 'auto', 'cpu', 'cuda'"),
        ({"attention_backend": "triton"}, "got 'triton', on cpu there is 'torch_native'"),
        ({"quantization": "fp8"}, "quantization: 'fp8' is not built yet"),
        ({"cuda_graph_max_bs": 8}, "cuda_graph_max_bs: got 8, not built yet; leave it out"),
        ({"memory_budget": "8 parrots"}, "memory_budget: size '8 parrots' has the unknown unit"),
        ({"memory_budget": -1}, "memory_budget: size -1 is negative"),
        ({"memory_budget": 0}, "memory_budget: got 0, the least is 1"),
        ({"memory_budget": 1, "mem_fraction_static": 0.5}, "both given, they name the same"),
        ({"mem_fraction_static": 1.2}, "mem_fraction_static: got 1.2, the most is 1.0"),
        ({"random_seed": -1}, "random_seed: got -1, the least is 0"),
        ({"max_total_tokens": 0}, "max_total_tokens: got 0, the least is 1"),
        ({"enable_mixed_chunk": 1}, "enable_mixed_chunk: got 1, a value of kind bool is needed"),
        ({"dtype": "float8"}, "dtype: got 'float8', not built or unknown; use"),
        ({"model_path": 5}, "model_path: got 5, a value of kind str is needed"),
    ],
)
def test_engine_arguments(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_args(args)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_default_is_accepted() -> None:
    given = {arg.name: arg.default for arg in ARGS if arg.default is not None}
    assert EngineConfig.from_args(given) == EngineConfig.from_args({})
