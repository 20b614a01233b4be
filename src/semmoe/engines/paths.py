"""Choose, for each forward pass, how tokens meet their experts: every path is lossless, so the cheapest is taken.

    shuffled   the plan's slices, around an expert all-to-all: fewest bytes
    whole      no all-to-all: every rank computes its own experts for all rows, and one all-reduce adds them up, as
               engines do without an all-to-all: fewest messages

With few tokens the number of messages decides, with many their bytes. Which is cheaper where is measured at the start,
by passes through the model itself. The choice depends on nothing but the pass's number of tokens, these times, which
all ranks share, and the choice before, so that all ranks make the same without a message.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from semmoe.dataset import Prompt, check_token_ids, encode
from semmoe.engines.counters import Reading
from semmoe.engines.step import Step
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.settings import PATHS
from semmoe.texts import held_out_prompts

log = logging.getLogger(__name__)
SHUFFLED, WHOLE = PATHS
SIZES = (1, 4, 16, 64, 256, 1024)  # tokens of the passes that are timed
ROUNDS, MOST_ROUNDS, MOST_SECONDS = 5, 15, 10.0  # of a size
MARGIN = 0.05  # a path is left for one that is faster by more than this share


@dataclass(frozen=True)
class PathTimes:
    """The time of a pass, by its number of tokens and path; equal on all ranks."""

    sizes: np.ndarray  # (P,) tokens, rising
    seconds: Mapping[str, np.ndarray]  # (P,) by path

    def of(self, path: str, num_tokens: int) -> float:
        """Seconds of a pass, interpolated; above the largest size times grow in proportion to it."""
        beyond = max(num_tokens / self.sizes[-1], 1.0)
        return float(np.interp(num_tokens, self.sizes, self.seconds[path])) * beyond

    def best(self, num_tokens: int) -> str:
        return min(self.seconds, key=lambda path: self.of(path, num_tokens))


@dataclass
class PathChoice:
    """Chooses the path of one pass after another, and counts passes by path. All ranks must call it alike."""

    times: PathTimes
    passes: Counter[str] = field(default_factory=Counter)
    _last: str = ""

    def choose(self, num_tokens: int) -> str:
        """The cheapest path of a pass over so many tokens, or the last pass's path while that costs hardly more."""
        best = self.times.best(num_tokens)
        stays = self._last and self.times.of(self._last, num_tokens) <= (1 + MARGIN) * self.times.of(best, num_tokens)
        self._last = self._last if stays else best
        self.passes[self._last] += 1
        return self._last

    def readings(self, labels: Mapping[str, str]) -> Iterator[Reading]:
        """The counter of passes by path."""
        for path, count in list(self.passes.items()):
            yield "passes", {**labels, "path": path}, count


def only(path: str) -> PathChoice:
    """The choice among one path."""
    return PathChoice(PathTimes(np.array([1]), {path: np.zeros(1)}))


def check_path(asked: str, can_whole: bool) -> str:
    """SEMMOE_PATH, or the one path that is possible; can_whole: whether experts can run without the all-to-all.

    Raises ValueError if that is asked for in vain.
    """
    if asked == WHOLE and not can_whole:
        raise ValueError(
            "SEMMOE_PATH=whole needs one attention group over all ranks, and semmoe's all-to-all, as on a CPU: omit it"
        )
    return asked if can_whole else SHUFFLED


def dummy_step(token_ids: np.ndarray, num_requests: int) -> Step:
    """Tokens (N,) of so many requests, all of which begin."""
    num_tokens = len(token_ids)
    rows = np.sort(np.arange(num_tokens) % num_requests)
    return Step(
        token_ids=token_ids,
        positions=np.arange(num_tokens) - np.searchsorted(rows, rows),
        rows=rows,
        slots=np.arange(num_requests),
        requests=[""] * num_requests,
        decoding=np.ones(num_tokens, bool),
    )


@functools.cache
def text_ids(tokenizer: str, vocab_size: int) -> np.ndarray:
    """(SIZES[-1],) token ids of running text; where there is no tokenizer, at random.

    A plan keeps fewer of random tokens on their rank than of text, for which the shuffled path would be left too often.
    """
    try:
        prompts = [Prompt(text=text) for _, _, text in held_out_prompts(per_domain=2)]
        ids = np.concatenate(found := encode(prompts, load_tokenizer(tokenizer), SIZES[-1]))
        check_token_ids(found, vocab_size)
    except (ValueError, OSError) as error:
        log.warning("semmoe: paths of passes are timed with random tokens in place of text: %s", error)
        ids = np.random.default_rng(0).integers(0, vocab_size, SIZES[-1])
    return np.resize(ids, SIZES[-1])


def measured_choice(run: Callable[[str, int], None], most_tokens: int, group: Any, device: torch.device) -> PathChoice:
    """Time all paths, as in `measure`, and log which is the cheapest."""
    times = measure(run, PATHS, most_tokens, group, device)
    if dist.get_rank(group) == 0:
        log.info("semmoe: cheapest path of a pass by its tokens, and ms: %s", table(times))
    return PathChoice(times)


def measure(
    run: Callable[[str, int], None], paths: Iterable[str], most_tokens: int, group: Any, device: torch.device
) -> PathTimes:
    """Time passes on every path; all ranks of `group`, a process group of the host, must call it together.

    run: passes so many tokens through the model on a path. A round runs every path once, in turn, so that whatever else
    the machine does falls on all alike, and the slowest rank counts. A path's time is the median of its rounds.
    """
    names, sizes = list(paths), [size for size in SIZES if size <= most_tokens] or [most_tokens]
    seconds = [_medians(lambda turn: _round(run, names, size, turn, group, device), group) for size in sizes]  # noqa: B023
    return PathTimes(np.array(sizes), dict(zip(names, np.transpose(seconds), strict=True)))


def _medians(run_round: Callable[[int], list[float]], group: Any) -> np.ndarray:
    """(paths,) medians of rounds. While rounds do not agree on the quickest path there are more: the choice is kept."""
    rounds = torch.zeros((0, len(run_round(0))), dtype=torch.float64)  # the first round warms up
    while len(rounds.argmin(dim=1).unique()) != 1 and len(rounds) < MOST_ROUNDS and rounds.sum() < MOST_SECONDS:
        slowest = torch.tensor([run_round(turn) for turn in range(ROUNDS)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        rounds = torch.cat([rounds, slowest])
    return np.median(rounds.numpy(), axis=0)


def _round(run: Callable[[str, int], None], names: list[str], size: int, turn: int, *where: Any) -> list[float]:
    """Seconds of a pass on each path, of which another is the first in each turn."""
    found = {name: _timed(functools.partial(run, name, size), *where) for name in np.roll(names, turn).tolist()}
    return [found[name] for name in names]


def _timed(run: Callable[[], None], group: Any, device: torch.device) -> float:
    dist.barrier(group=group)
    started = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def table(times: PathTimes) -> str:
    """One line for the log: the cheapest path by number of tokens, and the times of all in milliseconds."""
    cells = [
        f"{size}: {times.best(size)} ("
        + ", ".join(f"{path} {1000 * values[i]:.2f}" for path, values in times.seconds.items())
        + ")"
        for i, size in enumerate(times.sizes)
    ]
    return "; ".join(cells)
