"""Load a model's tokenizer and compute its hash; this needs no torch, for commands that run no model."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    require_local(path)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def require_local(path: str) -> None:
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"there is no model at {path}: config.json is missing")


def tokenizer_hash(tokenizer: Any) -> str:
    return digest(sorted((index, token) for token, index in tokenizer.get_vocab().items()))


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
