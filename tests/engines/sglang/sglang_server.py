"""SGLang's server for the tests."""

import json
import re

import requests
from serving import NEW_TOKENS, Server


class SglangServer(Server):
    ENGINE = "sglang"
    PLAIN = ("-m", "sglang.launch_server", "--model-path")
    LIMITS = ("--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16",
              "--chunked-prefill-size", "128", "--mem-fraction-static", "0.1", "--random-seed", "0", "--log-level",
              "info")  # fmt: skip
    READY = "ready to roll"
    RANK = "::scheduler"

    def send(
        self, prompt, new_tokens=NEW_TOKENS, rank=None, stream=False, endless=False, **fields
    ) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": endless}
        body = {"input_ids": prompt, "sampling_params": sampling, "routed_dp_rank": rank, "stream": stream}
        body |= fields  # SGLang's own
        answer = requests.post(f"{self.url}/generate", json=body, timeout=120, stream=stream)
        if rank is not None:
            assert answer.json()["meta_info"]["dp_rank"] == rank
        return answer

    def tokens(self, answer):
        return answer.json()["output_ids"]

    def streamed(self, answer):
        parts = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        return parts[-1]["output_ids"]  # each part has all so far

    def reason(self, answer):
        return answer.json()["meta_info"]["finish_reason"]["type"]

    def cached(self, answer):
        return answer.json()["meta_info"]["cached_tokens"]

    def preemptions(self):
        return sum(map(int, re.findall(r"Testing retraction\. #retracted_reqs: (\d+)", self.log)))
