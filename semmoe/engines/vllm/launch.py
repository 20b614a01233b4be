"""vLLM's own arguments and environment for a plan: what `semmoe serve` prints and runs."""

import os
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from semmoe.core import Plan, Topology
from semmoe.engines.launch import join
from semmoe.engines.settings import PluginSettings
from semmoe.engines.vllm.settings import VllmSettings

DECIDED = {
    "--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp", "--enable-expert-parallel", "--enable-eplb",
    "--pipeline-parallel-size", "-pp", "--no-enable-expert-parallel",
}  # fmt: skip
# One thread a rank and a small cache: what is served on a CPU is small, and ranks share its cores.
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def on_cpu() -> bool:
    """Whether this vLLM runs on the CPU."""
    return "cpu" in version("vllm")


def arguments(topology: Topology, eager: bool) -> dict[str, Any]:
    """Options of `vllm serve` and of vllm.LLM, by name. eager: nothing is compiled, as shuffling and CPUs need."""
    out: dict[str, Any] = {"tensor_parallel_size": topology.attn_tp_size} if topology.attn_tp_size > 1 else {}
    if topology.dp_size > 1:
        out |= {"data_parallel_size": topology.dp_size}
    if topology.ep_size > 1:
        out |= {"enable_expert_parallel": True}
    return out | ({"enforce_eager": True} if eager else {})


def environment(settings: PluginSettings, cpu: bool) -> dict[str, str]:
    """What to add to the environment."""
    own = {"VLLM_USE_V2_MODEL_RUNNER": "0"} | (CPU_VARIABLES if cpu else {})
    return settings.environment() | {name: os.environ.get(name, value) for name, value in own.items()}


def server(
    model: str, plan: Plan | None, topology: Topology, given: PluginSettings, host: str, port: int, options: list[str]
) -> tuple[dict[str, str], list[str]]:
    """What to add to the environment, and the words after `python`; options: vLLM's own, from the user."""
    assert given.folder is not None
    cpu, settings = _runs_on_cpu(), VllmSettings(**asdict(given))
    shuffles = bool(plan and plan.schedule and plan.schedule.shuffle) and settings.shuffle != "off"
    # One front end: it alone knows all requests. More would each see a share.
    values = arguments(topology, cpu or shuffles)
    values |= {} if "--headless" in options else {"api_server_count": 1}  # a node without a front end
    words = ["-m", "vllm.entrypoints.cli.main", "serve", model, "--host", host, "--port", str(port)]
    meeting = given.folder / "prometheus"  # of vLLM's processes; `semmoe serve` empties it before a start
    meeting.mkdir(mode=0o700, exist_ok=True)
    variables = environment(settings, cpu) | {"PROMETHEUS_MULTIPROC_DIR": str(meeting)}
    return variables, words + join(values, options, DECIDED, "vllm serve")


def _runs_on_cpu() -> bool:
    try:
        return on_cpu()
    except ModuleNotFoundError:  # what would be run is shown without vLLM too
        return False
