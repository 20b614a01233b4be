"""vLLM's servers for the benchmarks."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from semmoe.cli.demo import MODEL
from semmoe.engines.launch import Asked, command_line
from semmoe.engines.vllm import launch
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.plan import load_plan
from serving.engine import Command, Engine, SetUp, python
from serving.network import Network

PATIENT = Path(__file__).parents[1] / "patient"  # the folder of a plug-in
BUSY = re.compile(r'^vllm:num_requests_(?:running|waiting)\{.*?engine="(\d+)".*\} ([0-9.e+]+)$', re.MULTILINE)


class Vllm(Engine):
    NAME, TITLE = "vllm", "vLLM"
    NOTE = "processes sleep between two looks at each other's messages, where vLLM's spin (benchmarks/patient)"
    RANK = ("VLLM::Worker", "VLLM::EngineCore_DP")
    OPTIONS: ClassVar[dict[str, Any]] = {
        "dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 2048,
        "block_size": 32, "gpu_memory_utilization": 0.1, "seed": 0, "disable_uvicorn_access_log": True,
    }  # fmt: skip
    # As by default on a GPU, a rank of attention-DP schedules for itself. On a CPU vLLM has a process beside each rank
    # for that, unless the executor is asked for by its path.
    BY_ATTENTION: ClassVar[dict[str, dict[str, Any]]] = {
        "dp": {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
    }
    UNCACHED: ClassVar[dict[str, Any]] = {"no_enable_prefix_caching": True}
    GRACE = 20.0  # what is killed leaves its shared memory behind
    WRONG_RANK_HEADERS: ClassVar[dict[str, str]] = {"X-data-parallel-rank": "99"}

    def serve(self, up: SetUp, folder: Path, port: int, options: dict[str, Any]) -> Command:
        settings = VllmSettings(
            plan=str(up.plan or ""), schedule=up.schedule, shuffle=up.shuffle, control=str(folder),
            # Without data parallelism vLLM's own way has no all-to-all: every rank of an attention group has all rows.
            sequence_parallel="1" if up.attention == "tp" and up.all_to_all else "",
        )  # fmt: skip
        words = command_line(self.OPTIONS | self.BY_ATTENTION.get(up.attention, {}) | options)
        asked = Asked(
            model=str(MODEL), topology=up.topology, settings=settings, host="127.0.0.1", port=port, options=words
        )
        environment, words = launch.planned(asked, load_plan(up.plan)) if up.plan else launch.vanilla(asked)
        path = os.pathsep.join(filter(None, [str(PATIENT), os.environ.get("PYTHONPATH")]))
        plugins = environment["VLLM_PLUGINS"] + ",semmoe_patient"
        return Command(python(*words), environment | {"PYTHONPATH": path, "VLLM_PLUGINS": plugins})

    def on_node(self, up: SetUp, network: Network, node: int, port: int) -> Command:
        at: dict[str, Any] = {"nnodes": network.hosts, "node_rank": node, "master_addr": network.address(0)}
        at |= {"master_port": port}
        if up.attention == "dp":
            at = {"data_parallel_size_local": 1, "data_parallel_address": network.address(0)}
            at |= {"data_parallel_rpc_port": port} | ({"data_parallel_start_rank": node} if node else {})
        headless = {"headless": True, "api_server_count": 0} if node else {}
        return Command(command_line(at | headless), {"VLLM_HOST_IP": network.address(node)})

    async def busy(self, session: aiohttp.ClientSession) -> list[int]:
        async with session.get("/metrics") as response:
            found = BUSY.findall(await response.text())
        totals: Counter[str] = Counter()
        for rank, value in found:
            totals[rank] += int(float(value))
        return [totals[rank] for rank in sorted(totals)]
