"""Attach parts to a rank of an engine: those that all adaptors share, and the checks before a rank serves.

An adaptor has two kinds of ranks: one without a plan, and one that is this and `OnPlan`. A part that is not needed is
one that does nothing, so that hooks need not ask.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from semmoe.core import Plan
from semmoe.engines import supervisor
from semmoe.engines.absent import NoRecorder, NoShuffle, NoTraffic
from semmoe.engines.counters import Counters, Reading
from semmoe.engines.hooks import Replacement, is_tried
from semmoe.engines.selfcheck import SelfCheck
from semmoe.engines.settings import PluginSettings
from semmoe.engines.step import Pass
from semmoe.engines.traffic import RankTraffic
from semmoe.live.recorder.files import refuse
from semmoe.live.recorder.passes import PassRecorder
from semmoe.live.recorder.recorder import LiveRecorder
from semmoe.live.swap import NoSwapper, Swapper, one_line
from semmoe.runtime.agreement import check_agreement
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.traffic import TrafficCounter
from semmoe.topology import Fingerprint, Topology

log = logging.getLogger(__name__)


class Host:
    """The parts of a rank. An adaptor's subclass hooks its engine and attaches them once the model is loaded."""

    ENGINE: ClassVar[str]
    VERSION: ClassVar[str]  # that is installed
    TRIED: ClassVar[str]  # the version that semmoe was tested with

    shuffles = False  # whether tokens are to be shuffled by a plan
    num_nodes = 1

    def __init__(self, settings: PluginSettings) -> None:
        self._settings = settings
        self._rank = 0  # in the expert-parallel group
        self._shuffle: Any = NoShuffle()  # the engine's kind of TokenRows
        self._recording: PassRecorder | NoRecorder = NoRecorder()
        self._traffic: TrafficCounter | NoTraffic = NoTraffic()
        self._check = SelfCheck()
        self.swapper: Swapper | NoSwapper = NoSwapper("no model is loaded")
        self.dispatch_comms: list[Communicator] = []  # communicators of the all-to-all on a CPU

    def hooks(self) -> list[Replacement]:
        """The places that this rank hooks, each with the function that replaces it."""
        raise NotImplementedError

    def _guard(self, step: Callable[[], Any]) -> Any:
        """Load the model or attach the parts; where one does not fit, report the reason, and let the engine end."""
        try:
            return step()
        except Exception as error:
            reason = one_line(error)
            log.critical("semmoe: %s; %s does not start", reason, self.ENGINE)
            supervisor.report(self._settings.folder, reason)
            raise

    def _judge(self, verdict: str) -> None:
        """Take a verdict on the first pass, "" if it is good: a family that was never run must have a good one."""
        if verdict and self._settings.untried:
            supervisor.report(self._settings.folder, f"this family of models does not prove itself: {verdict}")
            raise RuntimeError(verdict)
        self._degrade(verdict)

    def _without_experts(self, model: Any) -> None:
        """Do nothing for a model without experts that semmoe knows."""

    def _agree(self, group: Any) -> None:
        """Raise ValueError on every rank of a CPU process group unless all ranks are to serve in the same way."""
        check_agreement(group, self._decisive())

    def _decisive(self) -> dict[str, object]:
        """What all ranks must have the same of, by name. Paths may differ between nodes."""
        own = {"plan", "control"}
        return {"settings": {n: value for n, value in asdict(self._settings).items() if n not in own}}

    def _identity(self, model: str) -> Fingerprint:
        """The model that is served; model: its path or name."""
        from semmoe.engines.transformers.config import fingerprint_of

        return fingerprint_of(model)

    def _record(self, reason: str, num_layers: int, model: str, buffer: Callable[[int, int], Tensor]) -> bool:
        """Attach a recorder if this rank sees every row of its attention group; otherwise tell the `reason`.

        model: its path or name, read without a plan. buffer: makes the buffer that graphs need, by (num_layers, top_k).
        """
        folder = self._settings.folder
        assert folder is not None
        if reason:
            log.info("semmoe: no `semmoe record` here: %s", reason)
            refuse(folder, self._rank, reason)
            return False
        identity = self._identity(model)
        made = buffer(num_layers, identity.top_k) if self._settings.record == "1" else None
        self._recording = PassRecorder(LiveRecorder(folder, identity, self._rank), num_layers, made)
        self._shuffle.listen(self._recording.put)
        return True

    @contextmanager
    def _parts(self, this: Pass) -> Iterator[None]:
        """Let the parts know of a forward pass, which the block runs."""
        parts = self._shuffle, self._recording
        for part in parts:
            part.begin(this)
        try:
            yield
        finally:
            for part in parts:
                part.end()

    def _degrade(self, reason: str) -> None:
        """Count this rank as degraded, and log a reason that is new."""
        line = self._check.degrade(reason) if reason else ""
        if line:
            log.warning("semmoe: degraded: %s", line)

    def _publish(self, running: Topology, **labels: str) -> None:
        """Start publishing counters, and log that the plug-in is active (rank 0 at level INFO, others at DEBUG)."""
        engine = self.ENGINE.lower()
        tell_untried(self._rank, engine, self.VERSION, self.TRIED)
        labels = {"engine": f"{engine} {self.VERSION}", "attention": running.attention} | self._description() | labels
        counters = Counters(f"rank-{self._rank:05d}", self._settings.folder)
        counters.sources.append(functools.partial(self._readings, RankTraffic(rank=self._rank, topology=running)))
        counters.add("active", 1, **labels)
        counters.start()
        words = ", ".join(f"{name} {value}" for name, value in labels.items())
        log.log(logging.INFO if self._rank == 0 else logging.DEBUG, "semmoe: active: %s", words)

    def _description(self) -> dict[str, str]:
        """Labels that say on which plan this rank serves, in the log and in the `active` counter."""
        return {"method": "vanilla", "shuffle": "no", "redundant": "0", "plan": "none"}

    def _readings(self, traffic: RankTraffic) -> Iterator[Reading]:
        yield from traffic.readings(self._traffic, self.dispatch_comms, self._shuffle.comms)
        yield from self._shuffle.readings({"ep_rank": str(self._rank)})
        yield from self.swapper.readings()
        yield from self._check.readings()


class OnPlan(Host):
    """The parts of a rank that serves on a plan, in any engine; it precedes the adaptor's own class among the bases."""

    def __init__(self, plan: Plan, settings: PluginSettings) -> None:
        self.plan = plan
        self.shuffles = settings.shuffles(plan)
        self.num_nodes = plan.topology.num_nodes
        super().__init__(settings)

    def _decisive(self) -> dict[str, object]:
        return {"the plan": self.plan, **super()._decisive()}

    def _identity(self, model: str) -> Fingerprint:
        return self.plan.fingerprint

    def _description(self) -> dict[str, str]:
        return {
            "method": self.plan.method,
            "shuffle": "yes" if self.shuffles else "no",
            "redundant": str(self.plan.placement.redundant_experts),
            "plan": Path(self._settings.plan).name,
        }

    def _without_experts(self, model: Any) -> None:
        raise ValueError(f"{type(model).__name__} has no MoE layer that semmoe knows")

    def _check_plan(self, running: Topology, config: Any, sizes: tuple[int, int], model: str) -> None:
        """Raise ValueError unless the engine runs the plan's model; sizes: MoE layers and physical experts per layer.

        model: its path or name.
        """
        if self._settings.untried and running.attn_tp_size > 1:
            raise ValueError("families that were never run prove themselves in attention-DP alone: solve a plan for it")
        check_plan(self.plan, self.ENGINE, running, config, *sizes)
        if self._rank == 0:
            check_identity(self.plan, model)


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
        "experts chosen per token": (getattr(config, "num_experts_per_tok", f.top_k), f.top_k),
        "hidden width": (config.hidden_size, f.hidden_size or config.hidden_size),
        "physical experts": (physical, plan.placement.physical_to_logical_map.shape[1]),
    }
    for name, (here, planned) in found.items():
        if here != planned:
            raise ValueError(f"the model has {here} {name}, the plan was made for {planned}")


def check_identity(plan: Plan, model: str) -> None:
    """Raise ValueError if `model` is a directory of another model than the plan's; other names are not checked."""
    from semmoe.engines.transformers.config import fingerprint_of

    if Path(model).is_dir():
        plan.check(fingerprint_of(model))


def tell_untried(rank: int, engine: str, version: str, tried: str) -> None:
    """Log a warning on rank 0 if this version of the engine is not the tested one."""
    if rank == 0 and not is_tried(version, tried):
        log.warning(
            "semmoe: tried on %s %s, this is %s: run `semmoe doctor --engine %s`", engine, tried, version, engine
        )
