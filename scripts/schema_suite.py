"""Counts over JSON-Schema-Test-Suite: which schemas are refused, which instances are told apart.

    python scripts/schema_suite.py FOLDER [draft ...]

FOLDER is a checkout of the suite. Each group's schema is compiled as a request's is, in a process
that is killed when it hangs; each instance is followed token by token. An instance of a schema is
written with its members in the schema's order where the instance allows it, since output has that
order. Prints a table; the last line is JSON.
"""

import json
import queue
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from seawall.core.errors import RequestError
from seawall.core.grammar import GrammarSpec, schema_text
from seawall.engine.planning import DEMO_FOLDER
from seawall.grammar.base import GrammarError, Vocabulary
from seawall.grammar.compiler import Compiled, Compiler
from seawall.grammar.llguidance import LLGuidance
from seawall.text.tokenizer import Tokenizer

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
EOS = 1
VOCABULARY = Vocabulary(
    tokenizer_file=DEMO_FOLDER / "tokenizer.json", vocab_size=4096, eos_token_ids=(EOS,)
)


def ordered(value: object, schema: object) -> object:
    """The same instance, its members in the order of the schema's properties."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [ordered(item, items) for item in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {}) if isinstance(schema, dict) else {}
    known = known if isinstance(known, dict) else {}
    names = [name for name in known if name in value] + [n for n in value if n not in known]
    return {name: ordered(value[name], known.get(name)) for name in names}


def accepts(compiled: Compiled, ids: list[int]) -> bool:
    """Whether the grammar allows these tokens and may end after them."""
    assert compiled.template is not None
    matcher = compiled.template.matcher()
    words = np.zeros(VOCABULARY.num_words, np.int32)
    for i, token in enumerate(ids):
        matcher.fill(words)
        if not words.view(np.uint32)[token // 32] >> (token % 32) & 1:
            return False
        if matcher.accept(token):
            return i == len(ids) - 1
    matcher.fill(words)
    return bool(words.view(np.uint32)[EOS // 32] >> (EOS % 32) & 1)


def count(
    folder: Path, draft: str, compiler: Compiler, results: "queue.Queue[Compiled]"
) -> Counter:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    found: Counter = Counter()
    for file in sorted((folder / "tests" / draft).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            found["schemas"] += 1
            try:
                text = schema_text("json_schema", group["schema"])
            except RequestError:
                found["refused"] += 1
                continue
            compiler.submit(GrammarSpec(kind="json_schema", text=text))
            compiled = results.get()
            if compiled.error is not None:
                found["refused"] += 1
                found["timed out"] += "took longer" in compiled.error
                continue
            for test in group["tests"]:
                value = ordered(test["data"], group["schema"])
                written = json.dumps(value, ensure_ascii=False)
                try:
                    ids = tokenizer.encode(written, add_special_tokens=False)
                    accepted = accepts(compiled, ids)
                except (GrammarError, RequestError):
                    accepted = False
                kind = "valid" if test["valid"] else "invalid"
                found[kind] += 1
                found[f"{kind} accepted"] += accepted
                if accepted and not test["valid"]:
                    sys.stderr.write(
                        f"wrong: {draft} {file.name}: {group['description']}: {written[:60]}\n"
                    )
    return found


def main() -> None:
    folder, drafts = Path(sys.argv[1]), sys.argv[2:] or DRAFTS
    results: queue.Queue[Compiled] = queue.Queue()
    compiler = Compiler(VOCABULARY, LLGuidance, results.put)
    table = {draft: count(folder, draft, compiler, results) for draft in drafts}
    compiler.close()
    columns = ("schemas", "refused", "timed out", "valid", "valid accepted")
    columns += ("invalid", "invalid accepted")
    print("| draft | " + " | ".join(columns) + " |")
    print("| --- |" + " --- |" * len(columns))
    for draft, found in table.items():
        print(f"| {draft} | " + " | ".join(str(found[name]) for name in columns) + " |")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
