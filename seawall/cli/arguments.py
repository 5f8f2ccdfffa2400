"""The arguments of each subcommand. Torch-free: help and wrong usage cost no import of it."""

import argparse

from seawall.cli.engine_flags import (
    add_engine_flags,
    add_model,
    add_sampling_flags,
    natural,
    naturals,
    positive,
    size,
)

DEMO_BUDGET = 256 << 20


def demo(parser: argparse.ArgumentParser) -> None:
    """`seawall demo`."""
    parser.add_argument(
        "--memory-budget",
        type=size,
        default=DEMO_BUDGET,
        metavar="SIZE",
        help="the load line (default: 256MiB)",
    )
    parser.add_argument(
        "--seed", type=natural, default=3, metavar="N", help="of the story (default: 3)"
    )


def plan(parser: argparse.ArgumentParser) -> None:
    """`seawall plan`."""
    add_model(parser)
    parser.add_argument(
        "--device-memory",
        type=size,
        metavar="SIZE",
        help="memory of the device planned for, such as 141GiB (default: what this host has)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)


def generate(parser: argparse.ArgumentParser) -> None:
    """`seawall generate`."""
    add_model(parser)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to write on from")
    parser.add_argument(
        "--input",
        metavar="FILE",
        help='JSON lines {"id"?, "prompt" | "input_ids", "sampling_params"?}; - for stdin',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def score(parser: argparse.ArgumentParser) -> None:
    """`seawall score`."""
    add_model(parser)
    parser.add_argument(
        "texts",
        nargs="*",
        metavar="CONTEXT OPTION",
        help="quick form: score each OPTION after CONTEXT and print a table",
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help='JSON lines {"id"?, "text" | "input_ids" | ("context", "continuation")}; - for stdin',
    )
    parser.add_argument("--output", metavar="FILE", help="JSON lines, in input order; - for stdout")
    parser.add_argument(
        "--top-logprobs",
        type=natural,
        default=0,
        metavar="K",
        help="the K likeliest tokens at each position too",
    )
    parser.add_argument(
        "--reduce",
        choices=("none", "sum", "mean", "perplexity"),
        default="none",
        help="one value a line in place of its token logprobs (default: none)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with an output file that was left unfinished"
    )
    parser.add_argument("--json", action="store_true", help="the quick form as one JSON object")
    add_engine_flags(parser)


def doctor(parser: argparse.ArgumentParser) -> None:
    """`seawall doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def bench_offline(parser: argparse.ArgumentParser) -> None:
    """`seawall bench offline`."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--num-prompts", type=positive, default=256, metavar="N", help="requests (default: 256)"
    )
    group.add_argument(
        "--random-input-len",
        type=positive,
        default=256,
        metavar="N",
        help="longest prompt, tokens (default: 256)",
    )
    group.add_argument(
        "--random-output-len",
        type=natural,
        default=128,
        metavar="N",
        help="longest output, tokens; 0 only reads the prompts (default: 128)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are uniform in [R * longest, longest] (default: 0)",
    )
    group.add_argument(
        "--seed", type=natural, default=1, metavar="N", help="of lengths and ids (default: 1)"
    )
    group.add_argument("--return-logprob", action="store_true", help="ask for logprobs")
    group.add_argument(
        "--logprob-start-len",
        type=int,
        default=-1,
        metavar="N",
        help="first prompt position with logprobs; -1 for outputs only (default: -1)",
    )
    group.add_argument(
        "--top-logprobs-num", type=natural, default=0, metavar="K", help="best tokens a position"
    )
    group.add_argument("--json", metavar="FILE", help="write the result there too")
    add_engine_flags(parser, model_flag=True)


def bench_compare(parser: argparse.ArgumentParser) -> None:
    """`seawall bench compare`."""
    parser.add_argument(
        "--models",
        default="demo,dummy",
        metavar="LIST",
        help="demo, dummy (0.1B, random weights) or folders, comma-separated (default: demo,dummy)",
    )
    parser.add_argument(
        "--systems",
        default="seawall,batch,batch-sorted,continuous",
        metavar="LIST",
        help="seawall, batch (transformers' generate by 8), batch-sorted (the same by output "
        "length), continuous (transformers' continuous batching), comma-separated (default: all)",
    )
    parser.add_argument(
        "--num-requests", type=positive, default=256, metavar="N", help="(default: 256)"
    )
    parser.add_argument(
        "--num-requests-dummy",
        type=positive,
        default=48,
        metavar="N",
        help="for every model but demo (default: 48)",
    )
    parser.add_argument(
        "--threads", type=natural, default=0, metavar="N", help="0: as many as there are cores"
    )
    parser.add_argument(
        "--seed", type=natural, default=1, metavar="N", help="of lengths and ids (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")


def bench_memory(parser: argparse.ArgumentParser) -> None:
    """`seawall bench memory`."""
    parser.add_argument(
        "--model-path", default="demo", metavar="MODEL", help="for peaks and growth (default: demo)"
    )
    parser.add_argument(
        "--memory-budget",
        default="256MiB",
        metavar="BYTES",
        help="of each engine (default: 256MiB)",
    )
    parser.add_argument(
        "--num-requests",
        type=positive,
        default=64,
        metavar="N",
        help="to each engine, and in each round (default: 64)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=12, metavar="N", help="of the long run (default: 12)"
    )
    parser.add_argument(
        "--page-sizes",
        type=naturals,
        default=(1, 16, 64),
        metavar="LIST",
        help="of the tree (default: 1,16,64)",
    )
    parser.add_argument(
        "--cached-tokens",
        type=positive,
        default=1_000_000,
        metavar="N",
        help="that the tree holds at most (default: 1000000)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positive,
        default=131_072,
        metavar="N",
        help="of each prompt in the tree (default: 131072)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")


def bench_logits(parser: argparse.ArgumentParser) -> None:
    """`seawall bench logits`."""
    lists = (
        ("--rows", "rows scored at once (default: 1,64,1024; on CUDA 1,64,1024,8192)"),
        ("--vocab", "vocabulary sizes (default: 32000; on CUDA 32000,128256)"),
        ("--top-k", "best ids wanted a row (default: 0,20; on CUDA 0,1,8,20,100)"),
    )
    for flag, text in lists:
        parser.add_argument(flag, type=naturals, metavar="LIST", help=text)
    parser.add_argument(
        "--hidden-size",
        type=positive,
        metavar="N",
        help="columns of the LM head (default: 256; on CUDA 4096)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of rows and weights (default: float32; on CUDA bfloat16)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="of repeats, each way and shape (default: 0.5; on CUDA 1)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
