"""vLLM's server for the tests."""

import json

import requests
from serving import NEW_TOKENS, Server


class VllmServer(Server):
    ENGINE = "vllm"
    PLAIN = ("-m", "vllm.entrypoints.cli.main", "serve")
    LIMITS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens",
              "128", "--gpu-memory-utilization", "0.1", "--block-size", "32",
              "--enable-prompt-tokens-details")  # fmt: skip
    READY = "Application startup complete"
    RANK = "EngineCore"

    def send(self, prompt, new_tokens=NEW_TOKENS, rank=None, stream=False, endless=False) -> requests.Response:
        body = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": stream,
                "ignore_eos": endless, "return_token_ids": True}  # fmt: skip
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return requests.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120, stream=stream)

    def tokens(self, answer):
        return answer.json()["choices"][0]["token_ids"]

    def streamed(self, answer):
        parts = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        return [token for part in parts for choice in part["choices"] for token in choice["token_ids"] or ()]

    def reason(self, answer):
        return answer.json()["choices"][0]["finish_reason"]

    def cached(self, answer):
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0

    def preemptions(self):
        return self.metric("vllm:num_preemptions")

    def metric(self, name: str) -> float:
        """One of vLLM's own counters, summed over its labels."""
        lines = requests.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}_total", f"{name}{{")))
