"""SGLang's servers for the benchmarks."""

from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from semmoe.cli.demo import MODEL
from semmoe.engines.launch import command_line
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import launch
from semmoe.plan import load_plan
from serving.engine import Command, Engine, SetUp, python
from serving.network import Network


class Sglang(Engine):
    NAME, TITLE = "sglang", "SGLang"
    RANK = "sglang::scheduler"
    # What a rank holds at most is the same everywhere; a larger share of memory than it needs, since SGLang counts what
    # others take while it loads for its own weights.
    OPTIONS: ClassVar[dict[str, Any]] = {
        "dtype": "float32", "max_running_requests": 64, "max_total_tokens": 65536, "chunked_prefill_size": 1024,
        "mem_fraction_static": 0.4, "random_seed": 0, "log_level": "warning", "enable_metrics": True,
    }  # fmt: skip
    UNCACHED: ClassVar[dict[str, Any]] = {"disable_radix_cache": True}
    NATIVE = True
    WRONG_RANK: ClassVar[dict[str, Any]] = {"routed_dp_rank": 99}

    def serve(self, up: SetUp, folder: Path, port: int, options: dict[str, Any]) -> Command:
        location, redundant = None, 0
        if up.plan is not None:
            plan = load_plan(up.plan)
            location, redundant = launch.write_location(plan, MODEL, folder), plan.placement.redundant_experts
        a2a = launch.A2A if up.all_to_all else "none"
        values = launch.arguments(up.topology, location, redundant, on_cpu=True, a2a=a2a) | self.OPTIONS | options
        settings = PluginSettings(plan=str(up.plan or ""), schedule=up.schedule, shuffle=up.shuffle,
                                  control=str(folder))  # fmt: skip
        words = python("-m", "sglang.launch_server", "--model-path", str(MODEL), "--port", str(port))
        return Command(words + command_line(values), launch.environment(settings, up.topology, on_cpu=True))

    def on_node(self, up: SetUp, network: Network, node: int, port: int) -> Command:
        at = {"nnodes": network.hosts, "node_rank": node, "dist_init_addr": f"{network.address(0)}:{port}"}
        return Command(command_line(at), {"SGLANG_HOST_IP": network.address(node)})

    async def busy(self, session: aiohttp.ClientSession) -> list[int]:
        async with session.get("/v1/loads") as response:
            loads = (await response.json())["loads"]
        return [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads]
