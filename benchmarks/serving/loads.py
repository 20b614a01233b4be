"""Which prompts arrive when."""

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Load:
    """The same for every configuration of a round."""

    prompts: list[list[int]]
    arrivals: list[float]  # seconds


def draw(prompts: list[list[int]], rate: float, seconds: float, number: int, at_once: bool, length: int = 0) -> Load:
    """The load of round `number`: as many requests as arrive at `rate` a second in `seconds`, in random order.

    at_once: all of them at the start, else at random times.

    length: prompts of exactly so many tokens; 0: as they are.
    """
    rng, count = random.Random(number), max(round(rate * seconds), 2)
    chosen = cut(prompts, length, count, rng) if length else [rng.choice(prompts) for _ in range(count)]
    gaps = [0.0 if at_once else rng.expovariate(rate) for _ in range(count)]
    return Load(chosen, [round(at, 4) for at in accumulate(gaps)])


def cut(prompts: list[list[int]], length: int, count: int, rng: random.Random) -> list[list[int]]:
    """Pieces of exactly `length` tokens out of all prompts, joined."""
    ids = [token for prompt in prompts for token in prompt]
    starts = [rng.randrange(len(ids) - length) for _ in range(count)]
    return [ids[start : start + length] for start in starts]
