"""Both model classes of the harness over the embedded model, and tiny tasks written as files."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read by the libraries when they are imported: everything here is on disk.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import seawall
from seawall.eval.lm_eval_model import SeawallLM

# Small, so that two texts are longer than it and the pool has pages to spare for prefixes.
CONTEXT = 128
LINES = [
    "Once upon a time there was a king who had three daughters, and the youngest was so fair.",
    "The old woman took the basket and went into the forest to look for her lost son.",
    'The fox said to the wolf, "Brother, let us go down to the river and catch some fish."',
    "In the evening the soldier came to a little house where a light was burning.",
    "\u00abOuvrez, ma m\u00e8re!\u00bb cried the boy \u2014 but nobody came; 3 + 4 = 7.",
    "  A line that begins with spaces,\n\nand has an empty line in it.",
]
CHOICES = [
    ("The king had three", [" daughters", " sons", " green", " of the"]),
    ("The wolf ran into the", [" forest", " wood", " and said", " kingly"]),
    ("She went to sleep in her", [" bed", " little bed", " river", " crown of gold"]),
    ("The giant was very", [" hungry", " great", " once upon a time", " table"]),
    ("Then the prince rode away on his", [" horse", " white horse", " fox", " the"]),
]
PROMPTS = ["Once upon a time", "The king said to", "The little girl", "In a dark forest there"]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **task: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        **task,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def metric(name: str, aggregation: str = "mean", *, higher: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher}


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_task(
        folder,
        "sea_choice",
        [{"text": text, "choices": choices, "gold": 0} for text, choices in CHOICES],
        output_type="multiple_choice",
        doc_to_text="{{text}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{gold}}",
        target_delimiter="",
        fewshot_split="test",
        num_fewshot=2,
        metric_list=[metric("acc"), metric("acc_norm")],
    )
    write_task(
        folder,
        "sea_word",
        [{"text": text, "word": choices[0]} for text, choices in CHOICES],
        output_type="loglikelihood",
        doc_to_text="{{text}}",
        doc_to_target="{{word}}",
        target_delimiter="",
        metric_list=[metric("acc"), metric("perplexity", "perplexity", higher=False)],
    )
    write_task(
        folder,
        "sea_text",
        [{"text": text} for text in [*LINES, " ".join(LINES * 3), " ".join(LINES * 2)]],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[
            metric("word_perplexity", "weighted_perplexity", higher=False),
            metric("byte_perplexity", "weighted_perplexity", higher=False),
            metric("bits_per_byte", "bits_per_byte", higher=False),
        ],
    )
    write_task(
        folder,
        "sea_write",
        [{"text": text, "answer": "no"} for text in PROMPTS],
        output_type="generate_until",
        doc_to_text="{{text}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [".", "\n\n"], "max_gen_toks": 24, "do_sample": False},
        metric_list=[metric("exact_match")],
    )
    return folder


@pytest.fixture(scope="session")
def tasks(task_folder: Path) -> TaskManager:
    return TaskManager(include_path=str(task_folder), include_defaults=False)


@pytest.fixture(scope="session")
def seawall_lm() -> Iterator[SeawallLM]:
    lm = SeawallLM.create_from_arg_string(
        f"pretrained=demo,memory_budget=256MiB,dtype=float32,max_length={CONTEXT},"
        "max_running_requests=8,logits_workspace=8MiB,log_level=critical",
        {"batch_size": 4, "max_batch_size": None, "device": "cpu"},
    )
    yield lm
    lm.close()


@pytest.fixture(scope="session")
def hf_lm() -> HFLM:
    # Its max_length counts what the model reads; the last scored token comes on top.
    return HFLM(
        pretrained=str(Path(seawall.__file__).parent / "demo_model"),
        dtype="float32",
        device="cpu",
        batch_size=1,
        max_length=CONTEXT - 1,
    )
