"""Training text of the shipped model: the standard library, plus named MIT and Apache-2.0 prompt files if given."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from semmoe.traces.texts import HELD_OUT, held_out_documents, stdlib_root, topics

# Left out of the standard library: test data, generated grammar tables, other people's packages.
SKIP = ("test", "tests", "site-packages", "lib2to3", "idlelib", "ensurepip", "pydoc_data", "distutils", "__pycache__")
# Charmap modules are near-copies of each other: a few teach the form, eighty would be a quarter of the corpus.
CODECS = 16
HELD_OUT_SUBJECTS = {"astronomy", "high_school_statistics", "philosophy", "marketing", "virology", "jurisprudence"}
PROMPT_FILES = ("mmlu_57subjects", "fidbench_domains", "gsm8k_test", "mbpp", "humaneval")


def documents(prompts: Path | None) -> Iterator[tuple[str, str]]:
    """(source name, text) pairs, held-out documents and repeated paragraphs removed."""
    held_out = {name for names in HELD_OUT.values() for name in names}
    seen = {p for texts in held_out_documents().values() for text in texts.values() for p in paragraphs(text)}
    for name, text in _all_documents(prompts):
        if name.split(":", 1)[-1] in held_out:
            continue
        fresh = [p for p in text.split("\n\n") if len(p) < 80 or p.strip() not in seen]
        seen.update(paragraphs(text))
        if fresh:
            yield name, "\n\n".join(fresh)


def paragraphs(text: str) -> list[str]:
    return [p.strip() for p in text.split("\n\n") if len(p) >= 80]


def _all_documents(prompts: Path | None) -> Iterator[tuple[str, str]]:
    yield from ((f"topic:{name}", text) for name, text in sorted(topics().items()))
    root = stdlib_root()
    codecs = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").as_posix()
        if any(part in SKIP for part in path.relative_to(root).parts):
            continue
        if name.startswith("encodings/") and name not in HELD_OUT["codecs"]:
            codecs += 1
            if codecs % 7 or codecs > 7 * CODECS:
                continue
        yield f"stdlib:{name}", path.read_text(encoding="utf-8", errors="replace")
    if prompts is not None:
        for file in PROMPT_FILES:
            yield from _prompt_file(prompts / f"{file}.jsonl.gz")


def _prompt_file(path: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for i, line in enumerate(lines):
            row = json.loads(line)
            if row.get("subject") in HELD_OUT_SUBJECTS or (path.name.startswith("fidbench") and i % 10 == 0):
                continue
            yield f"{path.name.split('.')[0]}:{i}", _row_text(row)


def _row_text(row: dict) -> str:
    if "conversation" in row:
        return "\n".join(f"{turn['role']}: {turn['content']}" for turn in row["conversation"])
    if "choices" in row:
        options = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", row["choices"], strict=False))
        return f"Question: {row['question']}\n{options}\nAnswer: {'ABCDEFGH'[row['answer']]}"
    parts = (row.get(key, "") for key in ("question", "text", "prompt", "answer", "code", "canonical_solution"))
    return "\n".join(part for part in parts if part)


def sources(prompts: Path | None) -> list[str]:
    """One line per source: name, size, SHA-256 of the text that enters training."""
    groups: dict[str, tuple[int, hashlib._Hash]] = {}
    for name, text in documents(prompts):
        source = name.split(":", 1)[0]
        size, digest = groups.get(source, (0, hashlib.sha256()))
        digest.update(text.encode())
        groups[source] = (size + len(text), digest)
    return [f"{source}: {size:,} characters, sha256 {digest.hexdigest()}" for source, (size, digest) in groups.items()]
