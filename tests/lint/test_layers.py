"""Who may import whom: every import in the tree against one table, and the host without torch."""

import graphlib
import subprocess
import sys

import pytest
from source_tree import PACKAGE, imports, sources

# Parts that run without torch: a scheduler or a tokenizer can be tested on any laptop.
HOST = ("core", "memory", "cache", "text", "scheduler", "grammar", "process", "server")
DEVICE = (
    "device",
    "parallel",
    "kernels",
    "kv",
    "attention",
    "layers",
    "models",
    "sampling",
    "runner",
)

# part -> what it may import besides itself; "a.b" allows that one module of a part. Complete: a
# new part or edge is a line here, in the commit that needs it, with why.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "memory": {"core"},
    "cache": {"core"},
    "text": {"core"},
    "scheduler": {"core", "memory", "cache"},
    "process": {"core"},  # starting, watching and ending processes; knows no engine
    # Meets the engine only in core.wire and process. Of offline it shares what reads a call and
    # writes its result: parts without torch that know no engine either.
    "server": {
        "core",
        "text",
        "process",
        "offline.inputs",
        "offline.collect",
        "offline.forms",
        "offline.scores",
        "offline.score",
    },
    "device": {"core", "memory"},
    "parallel": {"core", "memory", "device"},  # memory: footprints of its buffers
    "kernels": {"core"},
    "grammar": {"core"},
    "kv": {"core", "memory", "device", "kernels"},  # memory: the page footprint
    "attention": {"core", "memory", "device", "kernels", "kv"},
    # memory.rope_spec: the frozen description of a rotary table, which footprints read too
    "layers": {"core", "memory.rope_spec", "parallel", "kernels", "attention.base"},
    # device: weights are made by or adopted into the arena
    "models": {"core", "memory", "device", "parallel", "attention.base", "layers"},
    "sampling": {"core", "memory", "device", "parallel", "kernels"},
    "runner": {
        "core",
        "memory",
        "device",
        "parallel",
        "kv",
        "attention",
        "models",
        "sampling",
    },
    # The composition root: everything but the front ends.
    "engine": {"core", "memory", "cache", "scheduler", "process", "grammar", *DEVICE},
    "offline": {"core", "text", "engine"},
    "ops": {"core", "sampling", "kernels", "parallel"},  # public numeric functions
    # Users of the public surface, which may therefore import the package itself.
    # sampling: `logits` times the step path itself, without the public checks
    # cache: `memory` times the prefix tree without an engine
    "benchmarks": {"core", "memory", "cache", "device", "offline", "ops", "sampling", "__init__"},
    "cli": {"core", "memory", "offline", "server", "engine", "benchmarks", "__init__"},
    "eval": {"core", "text", "offline"},  # text: the type of the engine's tokenizer
    # Front doors: they hand over to one part and hold nothing.
    "__init__": {"core", "offline", "ops"},
    "__main__": {"cli"},
    "launch_server": {"cli"},
}

# Third-party names beyond the standard library. Anything else is not a dependency of the core
# installation and may be imported only by the one module listed for it.
INSTALLED = {
    "huggingface_hub",
    "jinja2",
    "msgspec",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
}
OPTIONAL: dict[str, set[str]] = {
    "transformers": {"seawall.models.hf", "seawall.benchmarks.peers"},
    "flashinfer": {"seawall.attention.flashinfer", "seawall.kernels.flashinfer"},
    "lm_eval": {"seawall.eval.lm_eval_model"},
    "ray": {"seawall.process.ray"},
    "xgrammar": {"seawall.grammar.xgrammar"},
    "llguidance": {"seawall.grammar.llguidance"},
}
OPTIONAL_PARTS: dict[str, set[str]] = {
    "triton": {"kernels"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "uvloop": {"server"},
    "prometheus_client": {"server"},
    "zmq": {"server", "process", "engine"},
}

BLOCKED_IMPORT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError("blocked here: " + name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


def _edge_allowed(part: str, target: str) -> bool:
    """`target` is a dotted module of the package, without the package's own name."""
    allowed = MAY_IMPORT[part]
    return target.partition(".")[0] in allowed | {part} or any(
        target == name or target.startswith(name + ".") for name in allowed
    )


def _third_party_allowed(module: str, part: str, root: str) -> bool:
    if root in sys.stdlib_module_names:
        return True
    if part == "core":
        return root in {"numpy", "msgspec"}
    if root == "torch" and part in HOST:
        return False
    if root in INSTALLED:
        return True
    return module in OPTIONAL.get(root, set()) or part in OPTIONAL_PARTS.get(root, set())


def test_every_import_is_in_the_table() -> None:
    wrong = []
    for source in sources():
        assert source.package in MAY_IMPORT, f"{source.file}: part not in the table"
        for found in imports(source):
            root, _, target = found.target.partition(".")
            if root == "seawall":
                fine = not target or _edge_allowed(source.package, target)
            else:
                fine = _third_party_allowed(source.name, source.package, root)
            if not fine:
                wrong.append(f"{source.file}:{found.line}: {source.package} -> {found.target}")
    assert not wrong, "\n".join(["not allowed by the table:", *wrong])


def test_only_users_of_the_public_surface_import_it() -> None:
    """`import seawall` from any other part would make it depend on everything."""
    wrong = [
        f"{source.file}:{found.line}"
        for source in sources()
        for found in imports(source)
        if found.target == "seawall" and "__init__" not in MAY_IMPORT[source.package]
    ]
    assert not wrong, wrong


def test_table_has_no_cycle() -> None:
    edges = {part: {name.partition(".")[0] for name in to} for part, to in MAY_IMPORT.items()}
    assert set().union(*edges.values()) <= set(edges)
    order = list(graphlib.TopologicalSorter(edges).static_order())
    assert order[0] == "core"


def test_table_would_catch_a_wrong_import() -> None:
    assert _edge_allowed("layers", "attention.base")
    assert not _edge_allowed("layers", "attention.triton")
    assert not _edge_allowed("scheduler", "device.arena")
    assert not _third_party_allowed("seawall.text.tokenizer", "text", "transformers")
    assert not _third_party_allowed("seawall.cache.pages", "cache", "torch")
    assert not _third_party_allowed("seawall.core.units", "core", "tokenizers")


def _host_modules(part: str) -> list[str]:
    return [source.name for source in sources() if source.package == part]


@pytest.mark.parametrize("part", [part for part in HOST if (PACKAGE / part).is_dir()])
def test_host_part_imports_with_torch_blocked(part: str) -> None:
    modules = _host_modules(part)
    assert modules
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, *modules],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_blocker_blocks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, "torch"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "blocked here: torch" in done.stderr
