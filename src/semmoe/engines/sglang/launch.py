"""SGLang's own arguments and environment for a plan: what `semmoe serve` prints and runs."""

import hashlib
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from semmoe.checkpoint.engine_maps import write_sglang
from semmoe.core import Plan
from semmoe.engines import support
from semmoe.engines.launch import Asked, join
from semmoe.engines.settings import PluginSettings
from semmoe.topology import Topology

# On a CPU SGLang runs torch's operators; "deepep" then names the layout of rows, and semmoe's gloo dispatcher is used.
CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
}
A2A = "deepep"
GRAPHS = "--cuda-graph-backend-prefill"
DECIDED = support.DECIDED["sglang"]
PLACED = {"--enable-eplb", "--ep-dispatch-algorithm"}  # options that a plan also decides


def on_cpu() -> bool:
    """Whether SGLang runs on the CPU: by SGLANG_USE_CPU_ENGINE, or for lack of another device."""
    import torch

    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not torch.accelerator.is_available()


def arguments(
    topology: Topology, location: Path | None, redundant: int, on_cpu: bool, a2a: str = A2A
) -> dict[str, Any]:
    """Arguments of sglang.Engine by name; `command_line` turns them into options."""
    out: dict[str, Any] = {"tp_size": topology.ep_size, "ep_size": topology.ep_size}
    if topology.dp_size > 1:
        # A load-aware method, for requests that semmoe does not schedule, and so that the controller gets the loads.
        out |= {"dp_size": topology.dp_size, "enable_dp_attention": True, "load_balance_method": "total_requests"}
        out |= {"boundary_reduction": "ar"} if on_cpu and a2a == "none" else {}
    if topology.ep_size > 1:
        out |= {"moe_a2a_backend": a2a}
    if location is not None:
        out |= {"init_expert_location": str(location)}
        out |= {"ep_num_redundant_experts": redundant} if redundant else {}
    return out | (CPU_ARGUMENTS if on_cpu else {})


def environment(settings: PluginSettings, topology: Topology, on_cpu: bool) -> dict[str, str]:
    """Variables to add to the environment; on a CPU, cores are assigned to ranks round-robin."""
    if not on_cpu:
        return settings.environment()
    cores = sorted(os.sched_getaffinity(0))
    bind = "|".join(str(cores[rank % len(cores)]) for rank in range(topology.ep_size))
    own = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bind}
    return settings.environment() | {name: os.environ.get(name, value) for name, value in own.items()}


def write_location(plan: Plan, model: Path, folder: Path) -> Path:
    """Write the file for --init-expert-location; its name depends on its contents, so a running server's is kept."""
    said = hashlib.sha256(str(model.resolve()).encode() + plan.placement.physical_to_logical_map.tobytes())
    path = folder / f"expert_location-{said.hexdigest()[:16]}.json"
    if not path.exists():
        write_sglang(plan, model, path)
    return path


def vanilla(asked: Asked) -> tuple[dict[str, str], list[str]]:
    """Variables to add to the environment, and the words after `python`, for a server without a plan."""
    return _server(asked, arguments(asked.topology, None, 0, on_cpu()), DECIDED)


def planned(asked: Asked, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """The same for a server on a plan. Raises ValueError if the user's options would keep it from taking effect."""
    assert asked.settings.folder is not None
    location = write_location(plan, Path(asked.model), asked.settings.folder)
    values = arguments(asked.topology, location, plan.placement.redundant_experts, on_cpu())
    decided = DECIDED | PLACED
    if (asked.settings.shuffles(plan) or asked.settings.untried) and not on_cpu():
        # By default SGLang captures passes over prompts on CUDA, which would silently skip the shuffle and the proof.
        values |= {"cuda_graph_backend_prefill": "disabled"}
        decided |= {GRAPHS}
    return _server(asked, values, decided)


def _server(asked: Asked, values: dict[str, Any], decided: Set[str]) -> tuple[dict[str, str], list[str]]:
    words = ["-m", "sglang.launch_server", "--model-path", asked.model]
    words += ["--host", asked.host, "--port", str(asked.port), "--enable-metrics"]
    words += join(values, asked.options, decided, "sglang.launch_server")
    return environment(asked.settings, asked.topology, on_cpu()), words
