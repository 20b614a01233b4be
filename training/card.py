"""Write the model card from what `train.py` measured.

python training/card.py training/out/training.json src/semmoe/models/tiny
"""

import argparse
import json
from pathlib import Path

from corpus import HELD_OUT_SUBJECTS

from semmoe.traces.texts import HELD_OUT


def card(report: dict) -> str:
    settings, log = report["settings"], report["log"]
    losses = [entry for i, entry in enumerate(log) if i % max(len(log) // 12, 1) == 0 or entry is log[-1]]
    epochs = report["tokens_seen"] / report["tokens"]
    lines = [
        "# semmoe tiny",
        "",
        "A small Mixture-of-Experts language model in the Hugging Face `Qwen3MoeForCausalLM` format, shipped with",
        "semmoe so that its demo and tests run a real router on real text. It is good for that and for nothing else.",
        "",
        f"- {report['parameters']:,} parameters: 6 MoE layers, 32 experts of width 48, top-4, hidden 192, 8 heads;",
        "  vocabulary 4,096 (byte-level BPE of our own); weights in bfloat16.",
        f"- Trained from scratch by `training/train.py` on {report['tokens_seen']:,} tokens, {epochs:.1f} epochs of",
        f"  {report['tokens']:,}: {settings['steps']:,} steps of {settings['batch']} x 256 tokens, AdamW,",
        f"  peak learning rate {settings['lr']}, load-balancing loss {settings['balance']} per layer, seed",
        f"  {settings['seed']}, on a CPU.",
        "- Licence: Apache-2.0, as the project.",
        "",
        "## Data",
        "",
        f"The standard library of Python {report['python']} (PSF licence) with its language reference",
        "(`pydoc_data.topics`), and prompts under MIT (MMLU, GSM8K, MBPP, HumanEval) and Apache-2.0 (FIDBench",
        "chats). By source, without held-out texts and repeated paragraphs:",
        "",
        *[f"- {source}" for source in report["sources"]],
        "",
        "Held out of training, whole: the modules and topics listed in `src/semmoe/traces/texts.py` "
        f"({sum(map(len, HELD_OUT.values()))} in all), and any paragraph of theirs that stands elsewhere; "
        f"MMLU subjects {', '.join(sorted(HELD_OUT_SUBJECTS))}; every tenth FIDBench chat.",
        "",
        "## Training loss",
        "",
        "| step | loss | load-balancing loss |",
        "|---|---|---|",
        *[f"| {e['step']} | {e['loss']:.3f} | {e['balance']:.3f} |" for e in losses],
        "",
        "## Loss on held-out text, nats per token",
        "",
        "| domain | tokens | model | unigram |",
        "|---|---|---|---|",
        *[f"| {d} | {v['tokens']:,} | {v['loss']:.3f} | {v['unigram']:.3f} |" for d, v in report["held_out"].items()],
        "",
        "## Routing on held-out text",
        "",
        "Entropy of the load over experts, 1 if uniform; load of the busiest and the idlest expert over the mean.",
        "",
        "| layer | entropy | max/mean | min/mean |",
        "|---|---|---|---|",
        *[
            f"| {v['layer']} | {v['entropy']:.4f} | {v['load_max_over_mean']:.2f} | {v['load_min_over_mean']:.2f} |"
            for v in report["layers"]
        ],
        "",
        "All figures as measured by `training/train.py` (`training.json` beside this card).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text())
    report["held_out_documents"] = HELD_OUT
    (arguments.model / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.model / "README.md").write_text(card(report))


if __name__ == "__main__":
    main()
