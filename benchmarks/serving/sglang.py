"""SGLang's servers and bench client for the benchmarks."""

import json
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from network import Network

from semmoe.demo import MODEL
from semmoe.engines.launch import command_line
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.plan import load_plan
from serving.engine import Command, Engine, SetUp, python

# The client imports `datasets` for sets that it would load from the Hub: none here.
CLIENT = """
import importlib.machinery, importlib.util, sys, types, transformers
if importlib.util.find_spec("datasets") is None:
    stub = types.ModuleType("datasets")
    stub.__spec__, stub.load_dataset = importlib.machinery.ModuleSpec("datasets", None), None
    sys.modules["datasets"] = stub
from sglang.benchmark.serving import cli_main
cli_main()
"""


class Sglang(Engine):
    NAME, TITLE = "sglang", "SGLang"
    # Each rank needs little memory, and what it holds at most is the same everywhere.
    OPTIONS: ClassVar[dict[str, Any]] = {
        "dtype": "float32", "max_running_requests": 64, "max_total_tokens": 65536, "chunked_prefill_size": 1024,
        "mem_fraction_static": 0.1, "random_seed": 0, "log_level": "warning",
    }  # fmt: skip
    UNCACHED: ClassVar[dict[str, Any]] = {"disable_radix_cache": True}
    FIGURES: ClassVar[dict[str, str]] = {
        "request_throughput": "request_throughput", "output_throughput": "output_throughput",
        "median_ttft_ms": "median_ttft_ms", "p99_ttft_ms": "p99_ttft_ms", "median_e2e_ms": "median_e2e_latency_ms",
        "p99_e2e_ms": "p99_e2e_latency_ms", "p99_itl_ms": "p99_itl_ms",
    }  # fmt: skip
    NATIVE = True
    WRONG_RANK: ClassVar[dict[str, Any]] = {"routed_dp_rank": 99}

    def serve(self, up: SetUp, folder: Path, port: int, options: dict[str, Any]) -> Command:
        location, redundant = None, 0
        if up.plan is not None:
            plan = load_plan(up.plan)
            location, redundant = launch.write_location(plan, MODEL, folder), plan.placement.redundant_experts
        values = launch.arguments(up.topology, location, redundant, on_cpu=True) | self.OPTIONS | options
        settings = SglangSettings(plan=str(up.plan or ""), schedule=up.schedule, shuffle=up.shuffle,
                                  control=str(folder))  # fmt: skip
        words = python("-m", "sglang.launch_server", "--model-path", str(MODEL), "--port", str(port))
        return Command(words + command_line(values), launch.environment(settings, up.topology, on_cpu=True))

    def on_node(self, up: SetUp, network: Network, node: int, port: int) -> Command:
        at = {"nnodes": network.hosts, "node_rank": node, "dist_init_addr": f"{network.address(0)}:{port}"}
        return Command(command_line(at), {"SGLANG_HOST_IP": network.address(node)})

    def bench(
        self, port: int, dataset: Path, requests: int, rate: float, warmup: int, new_tokens: int, out: Path
    ) -> list[str]:
        words = python("-c", CLIENT, "--backend", "sglang", "--host", "127.0.0.1", "--port", str(port))
        words += ["--model", str(MODEL), "--dataset-name", "custom", "--dataset-path", str(dataset)]
        words += ["--num-prompts", str(requests), "--request-rate", str(rate), "--warmup-requests", str(warmup)]
        words += ["--sharegpt-output-len", str(new_tokens), "--seed", "0", "--disable-tqdm"]
        return [*words, "--output-file", str(out)]

    def dataset(self, texts: list[str]) -> str:
        # The client wants a second turn and ignores it.
        lines = [json.dumps({"conversations": [{"content": text}, {"content": "none"}]}) for text in texts]
        return "\n".join(lines) + "\n"

    async def busy(self, session: aiohttp.ClientSession) -> list[int]:
        async with session.get("/v1/loads") as response:
            loads = (await response.json())["loads"]
        return [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads]
