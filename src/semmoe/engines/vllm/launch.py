"""vLLM's own arguments and environment for a plan: what `semmoe serve` prints and runs."""

import os
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import Any

from semmoe.core import Plan
from semmoe.engines import support
from semmoe.engines.launch import Asked, join
from semmoe.engines.settings import PluginSettings
from semmoe.io import console
from semmoe.topology import Topology

DECIDED = support.DECIDED["vllm"]
# All-to-alls that send every row to every rank, whatever its experts; vLLM replaces the last two by the first.
GATHERS = {"allgather_reducescatter", "naive", "pplx"}
SENDS = "deepep_high_throughput"  # for both prompts and decoding; the low-latency backend takes few tokens at a time
A2A = "--all2all-backend"
# Passes over prompts are read on the host, so that only those that decode can be captured, and nothing is compiled.
DECODE_GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'
# Options with which tokens are not shuffled in CUDA graphs, or users set the passes that are captured.
OWN_GRAPHS = {"--enforce-eager", "--compilation-config", "-cc", "-O", "--cudagraph-mode"}
RETURNS = "--enable-return-routed-experts"
NOT_RETURNED = f"vLLM would return other tokens' experts where plans split tokens: omit {RETURNS}, or use attention dp"
DRAFTS = {"--speculative-config", "-sc", "--spec-method", "--spec-model"}
PLUGIN = "semmoe"
# Kinds of plug-ins that vLLM loads without being asked. Those that add endpoints must be named.
GROUPS = [f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger")]
# One thread per rank and a small cache: models served on a CPU are small, and ranks share its cores.
CPU_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def on_cpu() -> bool:
    """Whether this vLLM runs on the CPU."""
    return "cpu" in version("vllm")


def arguments(topology: Topology, eager: bool) -> dict[str, Any]:
    """Options of `vllm serve` and of vllm.LLM, by name. eager: compile nothing, as shuffling and CPUs require."""
    out: dict[str, Any] = {"tensor_parallel_size": topology.attn_tp_size} if topology.attn_tp_size > 1 else {}
    if topology.dp_size > 1:
        out |= {"data_parallel_size": topology.dp_size}
    if topology.ep_size > 1:
        out |= {"enable_expert_parallel": True}
    return out | ({"enforce_eager": True} if eager else {})


def environment(settings: PluginSettings, cpu: bool) -> dict[str, str]:
    """Variables to add to the environment."""
    own = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": plugins()} | (CPU_VARIABLES if cpu else {})
    return settings.environment() | {name: os.environ.get(name, value) for name, value in own.items()}


def plugins() -> str:
    """The names of all plug-ins, ours among them: vLLM loads an endpoint's only if it is named, and then no others.

    Raises ValueError if the user names plug-ins without ours, since no plan would be applied.
    """
    given = os.environ.get("VLLM_PLUGINS")
    if given is not None and PLUGIN not in given.split(","):
        raise ValueError(f"VLLM_PLUGINS={given} leaves semmoe out: add {PLUGIN} to it")
    return ",".join(sorted({PLUGIN, *(entry.name for group in GROUPS for entry in entry_points(group=group))}))


def vanilla(asked: Asked) -> tuple[dict[str, str], list[str]]:
    """Variables to add to the environment, and the words after `python`, for a server without a plan."""
    return _server(asked, arguments(asked.topology, _runs_on_cpu()))


def planned(asked: Asked, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """The same for a server on a plan. Raises ValueError if the user's options would keep it from taking effect."""
    cpu, options = _runs_on_cpu(), asked.options
    shuffles = asked.settings.shuffles(plan)
    if shuffles and RETURNS in _names(options):
        raise ValueError(NOT_RETURNED)
    captured = not cpu and shuffles and captures(options)
    values = arguments(asked.topology, cpu or asked.settings.untried == "1" or (shuffles and not captured))
    if captured and not OWN_GRAPHS & _names(options):
        values |= {"compilation_config": DECODE_GRAPHS}
    if asked.topology.ep_size > 1 and not cpu:
        values |= all_to_all(options)
    return _server(asked, values)


def _server(asked: Asked, values: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    assert asked.settings.folder is not None
    # One front end, since each of several would see only a share of the requests; some nodes have none.
    values |= {} if "--headless" in asked.options else {"api_server_count": 1}
    words = ["-m", "vllm.entrypoints.cli.main", "serve", asked.model, "--host", asked.host, "--port", str(asked.port)]
    meeting = asked.settings.folder / "prometheus"  # of vLLM's processes; `semmoe serve` empties it before a start
    meeting.mkdir(mode=0o700, exist_ok=True)
    variables = environment(asked.settings, _runs_on_cpu()) | {"PROMETHEUS_MULTIPROC_DIR": str(meeting)}
    return variables, words + join(values, asked.options, DECIDED, "vllm serve")


def captures(options: list[str]) -> bool:
    """Whether vLLM on a GPU may capture passes whose tokens are shuffled; options: vLLM's, from the user.

    Not with the all-to-all that is the default here, which waits for the host, nor with drafts.
    """
    return not DRAFTS & _names(options) and _backend(options) not in ("", SENDS, *GATHERS)


def all_to_all(options: list[str]) -> dict[str, str]:
    """Options to add, unless the user gave a backend, so that rows are sent only to the ranks of their experts."""
    named = _backend(options)
    if not named and find_spec("deep_ep") is not None:
        return {"all2all_backend": SENDS}
    backend = named or "allgather_reducescatter"
    if backend in GATHERS:
        console.warn(f"{gathers(backend)}; install deep_ep, or give {A2A} {SENDS}")
    return {}


def _backend(options: list[str]) -> str:
    """The all-to-all that the user names last; "" for none."""
    named = [i for i, word in enumerate(options) if word.split("=")[0] == A2A]
    return ("=".join(options[named[-1] : named[-1] + 2]).split("=") + [""])[1] if named else ""


def _names(options: list[str]) -> set[str]:
    return {word.split("=")[0] for word in options}


def gathers(backend: str) -> str:
    """Return a warning about the bytes that a backend which gathers all rows does not save."""
    return f"{A2A} {backend} sends every row to every rank: a plan balances experts' load, and saves no dispatch byte"


def _runs_on_cpu() -> bool:
    try:
        return on_cpu()
    except ModuleNotFoundError:  # the command is also shown where vLLM is not installed
        return False
