"""What `semmoe router` can be told; the command line takes its defaults from here."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from semmoe.core import require

BACKEND_RANKS = ("header", "urls")  # a backend has all ranks and is told one by a header, or it is one rank


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """`prefix_weight` is in units of the plan's score, which is the share of a request's (token, expert) pairs at home.

    1 means: a prompt that a rank has wholly in its cache counts as much as one whose experts are all on that rank. A
    cached token spares its whole prefill, of which the exchange of rows with other ranks is a part only; so this is
    the least that it is worth, and it outweighs whatever a plan's scores differ by. The bound on load holds all the
    same: a popular prefix spreads to as many ranks as its traffic needs. 0 schedules by plan and load alone.
    """

    backends: tuple[str, ...]
    backend_ranks: str = "header"
    max_in_flight: int = 1024  # scheduled requests at the backends, all together
    queue: int = 1024  # further ones that wait, the reading of their bodies included
    queue_seconds: float = 60.0  # longest wait, after which the client is told to come back
    prefix_weight: float = 1.0
    cache_tokens: int = 1 << 18  # prompt tokens that the prefix cache of one rank holds
    max_body: int = 64 << 20  # bytes of a request
    max_held: int = 1 << 30  # bytes of all that are scheduled, each read whole and held until it is answered
    head_seconds: float = 30.0  # for a client to send the head of a request, on a new connection from the first moment
    body_seconds: float = 60.0  # for it to send the body
    stall_seconds: float = 15.0  # without a byte of the body
    unread_seconds: float = 60.0  # for it to take what waits of an answer, once more waits than a connection buffers
    connect_seconds: float = 5.0
    idle_seconds: float = 3.0  # a connection is kept; less than the 5 s after which vLLM's and SGLang's servers close
    health_seconds: float = 2.0  # between two looks at a backend
    health_timeout: float = 5.0
    health_failures: int = 3  # late or bad answers in a row that make it unhealthy; a refused connection does at once
    tokenizer_threads: int = 2

    def __post_init__(self) -> None:
        require(len(self.backends) >= 1, "there must be at least one backend")
        require(len(set(self.backends)) == len(self.backends), f"a backend is given twice: {', '.join(self.backends)}")
        for url in self.backends:
            _check_url(url)
        known = self.backend_ranks in BACKEND_RANKS
        require(known, f"backend_ranks must be one of {', '.join(BACKEND_RANKS)}, not {self.backend_ranks!r}")
        for name in ("max_in_flight", "max_body", "health_failures", "tokenizer_threads"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("queue", "prefix_weight", "cache_tokens"):
            require(0 <= getattr(self, name) < float("inf"), f"{name} must be at least 0, not {getattr(self, name)}")
        enough = f"max_held must be at least max_body, {self.max_body}, not {self.max_held}"
        require(self.max_held >= self.max_body, enough)
        for name in ("queue_seconds", "head_seconds", "body_seconds", "stall_seconds", "unread_seconds",
                     "connect_seconds", "idle_seconds", "health_seconds", "health_timeout"):  # fmt: skip
            require(0 < getattr(self, name) < float("inf"), f"{name} must be positive, not {getattr(self, name)}")


def _check_url(url: str) -> None:
    example = "give it as http://HOST:PORT"
    parts = urlsplit(url)
    require(parts.scheme in ("http", "https") and bool(parts.hostname), f"{url!r} is no backend: {example}")
    bare = parts.path in ("", "/") and not parts.query and not parts.fragment and parts.username is None
    require(bare, f"backend {url!r} has more than a host and a port: {example}")
    try:
        valid = parts.port is None or parts.port > 0
    except ValueError:
        valid = False
    require(valid, f"backend {url!r} has no valid port: {example}")
