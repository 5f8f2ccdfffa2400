"""One system of compare_cpu.py, in a process of its own.

    python -m seawall.benchmarks.peers SYSTEM --model FOLDER --work FILE --result FILE

Reads a workload, times one system on it, writes counts, seconds and output ids. The only module
of the benchmarks that imports transformers. `make-dummy` writes a model with random weights.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as untyped_transformers

from seawall.benchmarks.workload import Workload
from seawall.offline.engine import Engine

# Its types are not strict; what it gives is checked by running it.
transformers: Any = untyped_transformers

_BATCH = 8
_WARM = 4
_WARM_TOKENS = 4
_CONTINUOUS_TOKENS = 512  # of a step; like chunked_prefill_size here
_CONTINUOUS_PAGE = 64
_DUMMY = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}

Outputs = list[list[int]]
System = Callable[[Workload], Outputs]


def seawall(folder: Path) -> Iterator[System]:
    """Engine.generate over everything at once."""
    with Engine(str(folder), skip_tokenizer_init=True, dtype="float32") as engine:

        def generate(work: Workload) -> Outputs:
            params = [
                {"max_new_tokens": n, "ignore_eos": True, "temperature": 0.0}
                for n in work.output_lens
            ]
            found = engine.generate(input_ids=work.prompts, sampling_params=params)
            return [result["output_ids"] for result in found]

        yield generate


def batch(folder: Path) -> Iterator[System]:
    """The peer's generate on 8 requests at a time, in the order they came."""
    model = _load(folder)
    yield lambda work: _in_batches(model, work, list(range(len(work.prompts))))


def batch_sorted(folder: Path) -> Iterator[System]:
    """The same on neighbours in output length: its best case, with lengths known beforehand."""
    model = _load(folder)
    yield lambda work: _in_batches(
        model, work, sorted(range(len(work.prompts)), key=lambda i: work.output_lens[i])
    )


def continuous(folder: Path) -> Iterator[System]:
    """The peer's continuous batching, each request with its own length."""
    model = _load(folder)

    def generate(work: Workload) -> Outputs:
        tokens = work.input_tokens + work.output_tokens
        config = transformers.ContinuousBatchingConfig(
            page_size=_CONTINUOUS_PAGE,
            # Room for every request at once: this system is not to be slowed by a small cache.
            num_blocks=tokens // _CONTINUOUS_PAGE + 2 * len(work.prompts),
            max_batch_tokens=_CONTINUOUS_TOKENS,
            allow_block_sharing=False,
        )
        settings = _greedy()
        settings.eos_token_id = -1
        found: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=config
        ) as manager:
            for i, prompt in enumerate(work.prompts):
                manager.add_request(
                    prompt, request_id=str(i), max_new_tokens=work.output_lens[i], eos_token_id=-1
                )
            while len(found) < len(work.prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended by itself")
        return [found[str(i)] for i in range(len(work.prompts))]

    yield generate


SYSTEMS = {
    "seawall": seawall,
    "batch": batch,
    "batch-sorted": batch_sorted,
    "continuous": continuous,
}


def make_dummy(folder: Path) -> None:
    """Write a Llama of 0.1B parameters with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**_DUMMY)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def _load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _greedy() -> Any:
    return transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)


def _in_batches(model: Any, work: Workload, order: list[int]) -> Outputs:
    found: Outputs = [[] for _ in order]
    for at in range(0, len(order), _BATCH):
        chosen = order[at : at + _BATCH]
        longest = max(work.output_lens[i] for i in chosen)
        ids = _generate(model, [work.prompts[i] for i in chosen], longest)
        for i, row in zip(chosen, ids, strict=True):
            found[i] = row[: work.output_lens[i]]
    return found


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], max_new_tokens: int) -> Outputs:
    longest = max(len(prompt) for prompt in prompts)
    pads = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + p for pad, p in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
    settings = _greedy()
    settings.max_new_tokens = max_new_tokens
    made = model.generate(ids, attention_mask=mask, generation_config=settings)
    rows: Outputs = made[:, longest:].tolist()
    return rows


def _measure(system: System, work: Workload) -> dict[str, object]:
    warm = work.prompts[:_WARM]
    system(Workload(prompts=warm, output_lens=[_WARM_TOKENS] * len(warm)))
    start, start_cpu = time.perf_counter(), time.process_time()
    outputs = system(work)
    duration, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    lengths = [len(ids) for ids in outputs]
    if lengths != work.output_lens:
        raise RuntimeError(f"wrote {sum(lengths)} tokens, {work.output_tokens} were asked for")
    return {
        "requests": len(outputs),
        "duration_s": duration,
        "cpu_s": cpu,
        "input_tokens": work.input_tokens,
        "output_tokens": work.output_tokens,
        "output_throughput": work.output_tokens / duration,
        "output_ids": outputs,
    }


def main() -> None:
    """Run one system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=[*SYSTEMS, "make-dummy"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.system == "make-dummy":
        make_dummy(arguments.model)
        return
    torch.set_num_threads(arguments.threads)
    work = Workload(**json.loads(arguments.work.read_text(encoding="utf-8")))
    for system in SYSTEMS[arguments.system](arguments.model):
        result = _measure(system, work)
        arguments.result.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
