"""Steps that the plug-ins of all engines share in a process with a model: check the plan, count, and log activity."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semmoe.core import Plan
from semmoe.engines.counters import Counters, Reading
from semmoe.engines.hooks import is_tried
from semmoe.engines.settings import PluginSettings
from semmoe.runtime.agreement import check_agreement
from semmoe.topology import Topology

log = logging.getLogger(__name__)


def check_plan(plan: Plan, engine: str, running: Topology, config: Any, num_layers: int, physical: int) -> None:
    """Raise ValueError unless `engine` runs a model of the plan's sizes on the plan's ranks.

    running: the engine's topology; config: Hugging Face's configuration; num_layers: MoE layers; physical: physical
    experts per layer.
    """
    t, f = plan.topology, plan.fingerprint
    if running != t:
        raise ValueError(
            f"the plan is for ep_size {t.ep_size}, attention {t.attention} with dp_size {t.dp_size}; "
            f"{engine} runs ep_size {running.ep_size}, attention {running.attention} with dp_size {running.dp_size}"
        )
    found = {
        "MoE layers": (num_layers, f.num_layers),
        "vocabulary entries": (config.vocab_size, f.vocab_size),
        "experts chosen per token": (config.num_experts_per_tok, f.top_k),
        "hidden width": (config.hidden_size, f.hidden_size or config.hidden_size),
        "physical experts": (physical, plan.placement.physical_to_logical_map.shape[1]),
    }
    for name, (here, planned) in found.items():
        if here != planned:
            raise ValueError(f"the model has {here} {name}, the plan was made for {planned}")


def check_same_plan(group: Any, plan: Plan | None, settings: PluginSettings) -> None:
    """Raise ValueError on every rank of a CPU process group unless all ranks have the same plan and settings.

    Paths may differ between nodes and are not compared.
    """
    own = {"plan", "control"}
    check_agreement(group, plan, settings={n: value for n, value in asdict(settings).items() if n not in own})


def check_identity(plan: Plan, model: str) -> None:
    """Raise ValueError if `model` is a directory of another model than the plan's; other names are not checked."""
    from semmoe.engines.transformers.config import fingerprint_of

    if Path(model).is_dir():
        plan.check(fingerprint_of(model))


def description(
    engine: str, plan: Plan | None, settings: PluginSettings, attention: str, shuffle: str
) -> dict[str, str]:
    """Labels that describe a rank in the log and in the `active` counter."""
    return {
        "engine": engine,
        "method": plan.method if plan else "vanilla",
        "attention": attention,
        "shuffle": shuffle,
        "redundant": str(plan.placement.redundant_experts if plan else 0),
        "plan": Path(settings.plan).name or "none",
    }


def tell_untried(rank: int, engine: str, version: str, tried: str) -> None:
    """Log a warning on rank 0 if this version of the engine is not the tested one."""
    if rank == 0 and not is_tried(version, tried):
        log.warning(
            "semmoe: tried on %s %s, this is %s: run `semmoe doctor --engine %s`", engine, tried, version, engine
        )


def publish(rank: int, folder: Path | None, labels: dict[str, str], source: Callable[[], Iterator[Reading]]) -> None:
    """Start publishing counters, and log that the plug-in is active (rank 0 at level INFO, others at DEBUG)."""
    counters = Counters(f"rank-{rank:05d}", folder)
    counters.sources.append(source)
    counters.add("active", 1, **labels)
    counters.start()
    words = ", ".join(f"{name} {value}" for name, value in labels.items())
    log.log(logging.INFO if rank == 0 else logging.DEBUG, "semmoe: active: %s", words)
