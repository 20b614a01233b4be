"""Attach parts to a rank of an engine: those that all adaptors share, and the checks before a rank serves.

A part that is not needed is one that does nothing, so that hooks need not ask.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from semmoe.core import Plan
from semmoe.engines import supervisor
from semmoe.engines.absent import NoRecorder, NoShuffle, NoTraffic
from semmoe.engines.counters import Counters, Reading
from semmoe.engines.hooks import is_tried
from semmoe.engines.selfcheck import SelfCheck
from semmoe.engines.settings import PluginSettings
from semmoe.engines.traffic import RankTraffic
from semmoe.live.recorder.files import refuse
from semmoe.live.recorder.passes import Listener, PassRecorder
from semmoe.live.recorder.recorder import LiveRecorder
from semmoe.live.swap import NoSwapper, Swapper
from semmoe.runtime.agreement import check_agreement
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.traffic import TrafficCounter
from semmoe.topology import Topology

log = logging.getLogger(__name__)


class Host:
    """The parts of a rank. An adaptor's subclass hooks its engine and attaches them once the model is loaded.

    engine, version: for people and labels. tried: the version that semmoe was tested with.
    """

    def __init__(self, plan: Plan | None, settings: PluginSettings, engine: str, version: str, tried: str) -> None:
        self._plan = plan
        self._settings = settings
        self._engine = engine
        self._version = version
        self._tried = tried
        self._rank = 0  # in the expert-parallel group
        self._shuffle: Any = NoShuffle()  # the engine's kind of TokenRows
        self._recording: PassRecorder | NoRecorder = NoRecorder()
        self._traffic: TrafficCounter | NoTraffic = NoTraffic()
        self._check = SelfCheck()
        self.swapper: Swapper | NoSwapper = NoSwapper("no model is loaded")
        self.dispatch_comms: list[Communicator] = []  # communicators of the all-to-all on a CPU

    @property
    def shuffles(self) -> bool:
        """Whether tokens are to be shuffled by the plan."""
        return self._settings.shuffles(self._plan)

    def _guard(self, attach: Callable[[], None]) -> None:
        """Attach the parts; where one does not fit, report the reason, and let the engine end."""
        try:
            attach()
        except ValueError as error:
            log.critical("semmoe: %s; %s does not start", error, self._engine)
            supervisor.report(self._settings.folder, str(error))
            raise

    def _check_plan(self, plan: Plan, running: Topology, config: Any, sizes: tuple[int, int], model: str) -> None:
        """Raise ValueError unless the engine runs the plan's model; sizes: MoE layers and physical experts per layer.

        model: its path or name.
        """
        check_plan(plan, self._engine, running, config, *sizes)
        if self._rank == 0:
            check_identity(plan, model)

    def _record(self, reason: str, num_layers: int, model: str, buffer: Callable[[int, int], Tensor]) -> bool:
        """Attach a recorder if this rank sees every row of its attention group; otherwise tell the `reason`.

        model: its path or name, read without a plan. buffer: makes the buffer that graphs need, by (num_layers, top_k).
        """
        from semmoe.engines.transformers.config import fingerprint_of

        folder = self._settings.folder
        assert folder is not None
        if reason:
            log.info("semmoe: no `semmoe record` here: %s", reason)
            refuse(folder, self._rank, reason)
            return False
        identity = self._plan.fingerprint if self._plan else fingerprint_of(model)
        made = buffer(num_layers, identity.top_k) if self._settings.record == "1" else None
        self._record_to(LiveRecorder(folder, identity, self._rank), num_layers, made)
        return True

    def _record_to(self, listener: Listener, num_layers: int, buffer: Tensor | None = None) -> None:
        """Pass the routing of every pass to `listener`."""
        self._recording = PassRecorder(listener, num_layers, buffer)
        self._shuffle.listen(self._recording.put)

    def _degrade(self, reason: str) -> None:
        """Count this rank as degraded, and log a reason that is new."""
        line = self._check.degrade(reason) if reason else ""
        if line:
            log.warning("semmoe: degraded: %s", line)

    def _publish(self, running: Topology, **labels: str) -> None:
        """Start publishing counters, and log that the plug-in is active (rank 0 at level INFO, others at DEBUG)."""
        tell_untried(self._rank, self._engine.lower(), self._version, self._tried)
        shuffle = self._settings.shuffle if self.shuffles else "no"
        engine = f"{self._engine.lower()} {self._version}"
        labels = description(engine, self._plan, self._settings, running.attention, shuffle) | labels
        counters = Counters(f"rank-{self._rank:05d}", self._settings.folder)
        counters.sources.append(functools.partial(self._readings, RankTraffic(rank=self._rank, topology=running)))
        counters.add("active", 1, **labels)
        counters.start()
        words = ", ".join(f"{name} {value}" for name, value in labels.items())
        log.log(logging.INFO if self._rank == 0 else logging.DEBUG, "semmoe: active: %s", words)

    def _readings(self, traffic: RankTraffic) -> Iterator[Reading]:
        yield from traffic.readings(self._traffic, self.dispatch_comms, self._shuffle.comms)
        yield from self._shuffle.readings({"ep_rank": str(self._rank)})
        yield from self.swapper.readings()
        yield from self._check.readings()


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
