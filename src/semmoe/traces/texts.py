"""Text that every Python installation contains, by domain: the demo's prompts and the held-out set.

The shipped model is trained on the rest of the standard library (see `training/`). Nothing listed in `HELD_OUT` is in
its training data, not even a paragraph that another file repeats.
"""

import importlib.util
import json
import sysconfig
from pathlib import Path

# Entire modules (paths under the standard library, without suffix) and entire `pydoc_data.topics` entries, by domain.
# All exist in Python 3.10 to 3.13; those that a slim distribution lacks are skipped.
HELD_OUT: dict[str, list[str]] = json.loads(Path(__file__).with_name("held_out.json").read_text(encoding="utf-8"))


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def topics() -> dict[str, str]:
    """Python's language reference as `help()` prints it, by topic; empty if a distribution lacks it."""
    if importlib.util.find_spec("pydoc_data.topics") is None:
        return {}
    from pydoc_data.topics import topics as entries

    return dict(entries)


def held_out_documents() -> dict[str, dict[str, str]]:
    """Text by domain and name, for every entry of `HELD_OUT` that this Python installation has."""
    reference = topics()
    documents: dict[str, dict[str, str]] = {}
    for domain, names in HELD_OUT.items():
        read = reference.get if domain == "reference" else _module
        documents[domain] = {name: text for name in names if (text := read(name))}
    return documents


def _module(name: str) -> str | None:
    path = stdlib_root() / f"{name}.py"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def chunks(text: str, chars: int) -> list[str]:
    """Cut `text` at line ends into pieces of `chars` to twice as many characters; a shorter rest is dropped."""
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= chars:
            pieces += [piece[i : i + 2 * chars] for i in range(0, len(piece), 2 * chars)]
            piece = ""
    return pieces


def held_out_prompts(per_domain: int, chars: int = 800) -> list[tuple[str, str, str]]:
    """(domain, document, prompt) triples, up to `per_domain` of each domain, round-robin over domains.

    Within a domain, chunks are taken round-robin over its documents, so that long ones do not crowd out the others.
    """
    by_domain = []
    for domain, documents in held_out_documents().items():
        queues = [[(domain, name, chunk) for chunk in chunks(text, chars)] for name, text in documents.items()]
        mixed = [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]
        by_domain.append(mixed[:per_domain])
    return [prompts[i] for i in range(per_domain) for prompts in by_domain if i < len(prompts)]
