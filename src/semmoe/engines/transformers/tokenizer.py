"""Load a model's tokenizer and compute its hash; this needs no torch, for commands that run no model."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from semmoe.checkpoint.directory import config_file
from semmoe.io.files import read_object

TOKENIZER_CONFIG, TIKTOKEN = "tokenizer_config.json", "tiktoken.model"
# Arguments of every `from_pretrained`: nothing is downloaded, and no code of the directory is run.
LOCAL_AND_INERT = {"local_files_only": True, "trust_remote_code": False}


def load_tokenizer(path: str) -> Any:
    """Load a model directory's tokenizer with transformers' own classes; no code of the directory is run.

    Raises ValueError for a tokenizer whose class is in the directory, and for files that transformers cannot read.
    """
    import transformers

    config_file(Path(path))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    kind = _own_class(Path(path))
    unknown, loader = kind is not None and not hasattr(transformers, kind), transformers.AutoTokenizer
    if unknown and (Path(path) / TIKTOKEN).is_file():
        loader = transformers.TokenizersBackend  # it has Kimi's vocabulary, but splits text by tiktoken's usual pattern
    elif unknown:
        raise ValueError(f"{path}: its tokenizer brings the class {kind} along, and semmoe runs no code of a model")
    try:
        return loader.from_pretrained(path, **LOCAL_AND_INERT)
    except Exception as error:  # a directory from elsewhere can make transformers raise almost anything
        raise ValueError(f"{path}: transformers cannot read the tokenizer: {one_line(error)}") from None


def _own_class(path: Path) -> str | None:
    """The tokenizer class for which a directory brings code, as `auto_map` says; None if it brings none."""
    stated = read_object(path / TOKENIZER_CONFIG) if (path / TOKENIZER_CONFIG).is_file() else {}
    mapped = stated.get("auto_map")
    named = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    return str(stated.get("tokenizer_class")) if named else None


def one_line(error: Exception) -> str:
    """The type of an exception and the beginning of its message, without line ends."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def tokenizer_hash(tokenizer: Any) -> str:
    return digest(sorted((index, token) for token, index in tokenizer.get_vocab().items()))


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
