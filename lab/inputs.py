"""What items are made from: routing, runs of the shipped model, and files of benchmarks; each made when asked for."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from lab.results import Part, parts
from lab.subjects import field_of
from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import Plan, RoutingTrace
from semmoe.io.files import read_limited
from semmoe.settings import DemoSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.dataset import LeftOut, Prompt, encode, read_prompts
from semmoe.traces.texts import held_out_prompts
from semmoe.traces.trace import open_trace

PER_DOMAIN = 96  # texts of each kind, which the shipped model was not trained on
MAX_TOKENS = 256  # of each
MAX_META_BYTES = 256 << 20  # unpacked; the strings of a vocabulary and examples take some MB
SHIPPED = "shipped model"

Task = Callable[[str, int], Callable[[int], None]]  # begins a progress bar and returns what advances it


def load_dataset(path: Path | str, limit: int = 0) -> list[Prompt]:
    """The first `limit` prompts of a file, all if 0. Raises ValueError that names the faulty line."""
    path = Path(path)
    if limit < 0:
        raise ValueError(f"limit must not be negative: {limit}")
    prompts = list(islice(read_prompts(path, LeftOut(path, strict=True)), limit or None))
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


@dataclass(frozen=True)
class Source:
    """Routing that items are made from."""

    name: str  # as people know it
    trace: RoutingTrace
    domains: list[str] | None = None  # of each request, where that is known

    def described(self) -> str:
        return f"{self.name}: {self.trace.num_requests} requests, {self.trace.num_tokens:,} tokens"


def _silent(what: str, total: int) -> Callable[[int], None]:
    return lambda done: None


@dataclass
class Inputs:
    """traces: files or directories to look at beside the shipped model's routing. datasets: kinds of prompts for the
    item on transfer; without any, the kinds of held-out text. results: a folder of what benchmarks wrote. effort: what
    plans are solved with, but for the method and the copies that an item names."""

    seed: int = 0
    traces: Sequence[Path] = ()
    datasets: Sequence[Path] = ()
    results: Path | None = None
    per_domain: int = PER_DOMAIN
    effort: SolveSettings = field(default_factory=SolveSettings)
    task: Task = field(default=_silent)
    _made: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def shipped(self) -> Source:
        """The shipped model's routing of held-out text, by kind of text."""
        texts = held_out_prompts(self.per_domain)
        return self._profiled([Prompt(text=text) for _, _, text in texts], [domain for domain, _, _ in texts])

    @cached_property
    def others(self) -> list[Source]:
        return [Source(_name(path), open_trace(path), _domains(path)) for path in self.traces]

    @cached_property
    def demo_profile(self) -> RoutingTrace:
        """The shipped model's routing of the text that the demo profiles; what the demo generates from is not in it."""
        from semmoe.engines.transformers.tokenizer import load_tokenizer

        return self._recorded(demo_prompts(DemoSettings(), load_tokenizer(str(MODEL)))[0])

    def solved(self, trace: RoutingTrace, topology: Topology, method: str = "semmoe", copies: int = 0) -> Plan:
        settings = replace(self.effort, method=method, redundant_experts=copies, seed=self.seed)
        return solve(trace, topology, settings)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made by the first item that asks."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def sources(self) -> list[Source]:
        return [self.shipped, *self.others]

    @cached_property
    def kinds(self) -> Source:
        """The shipped model's routing of each data set's prompts."""
        if not self.datasets:
            return self.shipped
        prompts = {_name(path): load_dataset(path, self.per_domain) for path in self.datasets}
        return self._profiled(
            [prompt for of in prompts.values() for prompt in of], [name for name, of in prompts.items() for _ in of]
        )

    @cached_property
    def parts(self) -> list[Part]:
        """Of every benchmark's run in the folder of results."""
        if self.results is None:
            return []
        if not self.results.is_dir():
            raise ValueError(f"{self.results}: there is no such folder of results")
        return [part for path in sorted(self.results.glob("*.txt")) for part in parts(path)]

    def _profiled(self, prompts: list[Prompt], domains: list[str]) -> Source:
        from semmoe.engines.transformers.tokenizer import load_tokenizer

        return Source(SHIPPED, self._recorded(encode(prompts, load_tokenizer(str(MODEL)), MAX_TOKENS)), domains)

    def _recorded(self, prompts: list[list[int]]) -> RoutingTrace:
        from semmoe.engines.transformers.model import load_model
        from semmoe.engines.transformers.recorder import record

        advance = self.task("profiling the shipped model", len(prompts))
        with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
            return record(load_model(str(MODEL)), str(MODEL), prompts, Path(scratch), advance)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _domains(path: Path) -> list[str] | None:
    """Fields of the subjects that NAME.meta.json.gz beside NAME.npz names, as examples/convert_fingerprinting.py
    writes it; None without that file."""
    meta = path.with_suffix(".meta.json.gz")
    if path.suffix != ".npz" or not meta.is_file():
        return None
    content = read_limited(meta, MAX_META_BYTES)
    try:
        examples = json.loads(content)["examples"]
        return [field_of(str(example["category"])) for example in examples]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{meta} does not list each request's category: {error}") from None
