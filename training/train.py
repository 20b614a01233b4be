"""Train the small MoE language model that semmoe ships, on a CPU or a GPU.

    python training/train.py --out training/out --prompts PATH_TO_PROMPT_FILES

The model is a plain Hugging Face `Qwen3MoeForCausalLM`; only its experts' forward is replaced while training,
by one matrix product per expert over tokens sorted by expert, which is several times faster on a CPU.
"""

import argparse
import json
import math
import platform
import shutil
import time
from pathlib import Path

import corpus
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from semmoe.traces.texts import held_out_documents

VOCABULARY, SEQUENCE, END = 4096, 256, "<|endoftext|>"
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=32, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=48, intermediate_size=384,
    decoder_sparse_step=1, norm_topk_prob=True, max_position_embeddings=2048, tie_word_embeddings=True,
    bos_token_id=None, eos_token_id=0, pad_token_id=0, router_aux_loss_coef=0.01,
)  # fmt: skip


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one stream of ids, each ended by the end-of-text id 0."""
    return np.concatenate([np.array(e.ids + [0], np.uint16) for e in tokenizer.encode_batch(texts)])


def sorted_experts(self, hidden, ids, weights):
    """(T, H), (T, K), (T, K) -> (T, H): tokens sorted by expert, one matrix product per expert."""
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=self.num_experts).tolist()
    tokens = order // ids.shape[1]
    outputs = []
    for e, rows in enumerate(hidden[tokens].split(counts)):
        gate, up = F.linear(rows, self.gate_up_proj[e]).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, self.down_proj[e]))
    weighted = torch.cat(outputs) * weights.reshape(-1)[order, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))


def attach(model) -> list[dict]:
    """Replace the experts' forward and collect each router's outputs; one dict per MoE layer, filled per step."""
    routed = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.forward = sorted_experts.__get__(experts)
        record = {}
        routed.append(record)
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out, record=record: record.update(logits=out[0], ids=out[2])
        )
    return routed


def balance_loss(record: dict, num_experts: int) -> torch.Tensor:
    """Switch-style load-balancing loss of one layer: experts x sum(share of choices x mean router probability)."""
    share = record["ids"].reshape(-1).bincount(minlength=num_experts).float()
    probability = record["logits"].float().softmax(-1).mean(0)
    return num_experts * torch.dot(share / share.sum(), probability)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over 100 steps, hold, and fall linearly over the last 40 %."""
    return peak * min(1.0, (step + 1) / 100, max(0.02, (steps - step) / (0.4 * steps)))


def train(model, stream: np.ndarray, out: Path, args) -> list[dict]:
    device = next(model.parameters()).device
    routed = attach(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-10, fused=True)
    rng, log, started, window = np.random.default_rng(args.seed), [], time.time(), []
    windows = epoch_windows(len(stream), args.batch, rng)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        starts = next(windows)
        batch = torch.from_numpy(np.stack([stream[s : s + SEQUENCE + 1] for s in starts]).astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            balance = torch.stack([balance_loss(r, model.config.num_experts) for r in routed]).mean()
        (loss + args.balance * balance * len(routed)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        window.append(loss.item())
        if (step + 1) % args.log_every == 0:
            entry = {"step": step + 1, "loss": float(np.mean(window)), "balance": balance.item()}
            entry["tokens_per_second"] = (step + 1) * args.batch * SEQUENCE / (time.time() - started)
            log.append(entry)
            window = []
            print(json.dumps(entry), flush=True)
        if (step + 1) % args.save_every == 0:
            save(model, out)
    return log


def epoch_windows(length: int, batch: int, rng: np.random.Generator):
    """Start offsets, `batch` at a time: every window of the stream once an epoch, at a fresh shift each time."""
    while True:
        starts = np.arange(rng.integers(SEQUENCE), length - SEQUENCE - 1, SEQUENCE)
        rng.shuffle(starts)
        yield from starts[: len(starts) // batch * batch].reshape(-1, batch)


def save(model, out: Path) -> None:
    """Weights in bfloat16, half the size; the model is loaded and compared in fp32."""
    state = {n: v.to(torch.bfloat16) for n, v in model.state_dict().items() if n != "lm_head.weight"}  # tied
    staged = out.with_name(out.name + ".partial")
    model.save_pretrained(staged, state_dict=state)
    config = json.loads((staged / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (staged / "config.json").write_text(json.dumps(config, indent=1))
    out.mkdir(parents=True, exist_ok=True)
    for file in staged.iterdir():
        file.replace(out / file.name)
    shutil.rmtree(staged)


@torch.no_grad()
def evaluate(model, tokenizer: Tokenizer, unigram: np.ndarray) -> dict:
    """Held-out loss per domain beside the unigram model's, and routing statistics per layer."""
    routed, load = attach(model), torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    by_domain = {}
    for domain, documents in held_out_documents().items():
        stream = encode(tokenizer, list(documents.values()))[: 64 * (SEQUENCE + 1)]
        batch = torch.from_numpy(stream[: len(stream) // (SEQUENCE + 1) * (SEQUENCE + 1)].astype(np.int64))
        batch = batch.view(-1, SEQUENCE + 1).to(model.device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
        by_domain[domain] = {
            "tokens": batch[:, 1:].numel(), "loss": loss, "unigram": float(-unigram[batch[:, 1:].cpu()].mean()),
        }  # fmt: skip
        for i, record in enumerate(routed):
            load[i] += record["ids"].cpu().reshape(-1).bincount(minlength=load.shape[1])
    share = (load / load.sum(1, keepdim=True)).numpy()
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(1) / math.log(share.shape[1])
    layers = [
        {"layer": i, "entropy": float(entropy[i]), "load_max_over_mean": float(s.max() / s.mean()),
         "load_min_over_mean": float(s.min() / s.mean())} for i, s in enumerate(share)
    ]  # fmt: skip
    return {"held_out": by_domain, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("training/out"))
    parser.add_argument("--prompts", type=Path, help="folder with the prompt files named in corpus.py")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch", type=int, default=16, help="sequences of 256 tokens")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss per layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast matrix products to bfloat16")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = [text for _, text in corpus.documents(args.prompts)]
    tokenizer = train_tokenizer(texts)
    order = np.random.default_rng(args.seed).permutation(len(texts))
    stream = encode(tokenizer, [texts[i] for i in order])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(args.out)
    counts = np.bincount(stream, minlength=VOCABULARY) + 1.0
    unigram = np.log(counts / counts.sum())
    model = Qwen3MoeForCausalLM(CONFIG).to("cuda" if torch.cuda.is_available() else "cpu")
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(texts):,} documents, {len(stream):,} tokens, {parameters:,} parameters", flush=True)
    log = train(model, stream, args.out, args)
    save(model, args.out)
    report = {
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "prompts")},
        "python": platform.python_version(), "sources": corpus.sources(args.prompts), "tokens": len(stream),
        "parameters": parameters,
        "tokens_seen": args.steps * args.batch * SEQUENCE, "log": log, **evaluate(model.eval(), tokenizer, unigram),
    }  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
