"""Convert the public gpt-oss-20b routing data into one trace file that every semmoe command takes.

    git clone https://github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting fingerprinting
    git -C fingerprinting checkout 72b368f60045221f21eeb65debb27d58de92e565
    python examples/convert_fingerprinting.py fingerprinting gpt-oss-20b_decode.npz
    semmoe replay gpt-oss-20b_decode.npz --method all

The data (Apache-2.0) holds the routing of generated tokens, layer by layer; prompts are there as text tokens only.
Beside the .npz a .meta.json.gz lists each request's dataset and category and the vocabulary of token strings.
"""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

LAYERS = 24


def convert(checkout: Path, out: Path) -> int:
    """Write `out` and its meta file from the example files of a checkout; returns the number of requests."""
    vocabulary: dict[str, int] = {}
    experts, tokens, first, examples = [], [], [], []
    for path in sorted((checkout / "data").rglob("*_examples.json"), key=lambda p: p.relative_to(checkout).as_posix()):
        content = json.loads(path.read_text(encoding="utf-8"))
        for example in content if isinstance(content, list) else [content]:
            routed = routing(example)
            if not routed:
                continue
            positions = sorted(routed)
            ids = [vocabulary.setdefault(token, len(vocabulary)) for token in example["full_text"]]
            tokens.append(np.array(ids, np.int32))
            experts.append(np.array([routed[p] for p in positions], np.uint8))
            first.append(positions[0])
            about = {key: example.get(key) for key in ("row_index", "dataset", "category")}
            examples.append({"path": path.relative_to(checkout).as_posix(), **about})
    if not examples:
        raise SystemExit(f"error: no *_examples.json with router_data under {checkout / 'data'}")
    np.savez_compressed(
        out, experts=np.concatenate(experts), route_starts=starts(experts), tokens=np.concatenate(tokens),
        token_starts=starts(tokens), pos0=np.array(first, np.int32),
    )  # fmt: skip
    with gzip.open(out.with_suffix(".meta.json.gz"), "wt", encoding="utf-8") as meta:
        json.dump({"examples": examples, "vocab": list(vocabulary)}, meta)
    return len(examples)


def routing(example: dict) -> dict[int, list[list[int]]]:
    """Position in the request's tokens -> expert ids (24, 4), most probable first."""
    out = {}
    for entry in example.get("router_data", []):
        for token, layers in entry.items():
            chosen = [layers[f"layer_{i}"]["selected_experts"] for i in range(LAYERS)]
            out[int(token.removeprefix("token_"))] = chosen
    return out


def starts(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(f"{convert(arguments.checkout, arguments.out)} requests in {arguments.out}")
