"""Settings of `semmoe router`; the command line takes its defaults from here."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from semmoe.bounds import check_numbers, choice, number
from semmoe.settings import MOST_WAIT_MS, WINDOW_HELP

SECONDS = (0.001, 86_400)
BACKEND_RANKS = ("header", "urls")  # a backend has all ranks and reads one from a header, or is one rank itself


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Settings of the router.

    `prefix_weight` has the unit of the plan's scores: the share of a request's (token, expert) pairs that are local. At
    1, a prompt that is fully cached on a rank counts as much as one whose experts are all on that rank. This is a lower
    bound of its worth, since a cached token saves its whole prefill and not only the exchange of rows; it outweighs any
    difference between a plan's scores. The bound on load applies regardless: a popular prefix spreads to as many ranks
    as its traffic needs. 0 schedules by plan and load only.
    """

    backends: tuple[str, ...]
    backend_ranks: str = choice(
        "header",
        BACKEND_RANKS,
        help="header: every backend has all ranks and is told one; urls: the backends are the ranks, in order.",
    )
    max_in_flight: int = number(1024, 1, 1 << 20, panel="Limits", help="Most requests at the backends.")
    # the reading of their bodies included
    queue: int = number(1024, 0, 1 << 20, panel="Limits", help="Most further ones that wait.")
    queue_seconds: float = number(60.0, *SECONDS, panel="Limits", help="Longest wait; then 503.")
    prefix_weight: float = number(1.0, 0, 1e6, help="Worth of a cached prompt, in shares of local experts.")
    window_ms: float = number(0, 0, MOST_WAIT_MS, help=WINDOW_HELP)
    cache_tokens: int = number(1 << 18, 0, 1 << 34, help="Prompt tokens that a rank's prefix cache holds.")
    max_body: int = number(  # bytes of a request
        64 << 20,
        1,
        1 << 34,
        panel="Limits",
        flag="max_body_mb",
        unit=1 << 20,
        help="Longest body of a request; then 413.",
    )
    # bytes of all that are scheduled, each read whole and held until it is answered
    max_held: int = number(
        1 << 30,
        1,
        1 << 40,
        panel="Limits",
        flag="max_held_mb",
        unit=1 << 20,
        help="Most of all bodies together; then 503.",
    )
    # for a client to send the head of a request, on a new connection from the first moment
    head_seconds: float = number(30.0, *SECONDS)
    body_seconds: float = number(
        60.0, *SECONDS, panel="Limits", help="Longest time for a client to send a body; then 408."
    )
    stall_seconds: float = number(
        15.0, *SECONDS, panel="Limits", help="Longest time without a byte of a body; then 408."
    )
    # for it to take what waits of an answer, once more waits than a connection buffers
    unread_seconds: float = number(60.0, *SECONDS)
    connect_seconds: float = number(5.0, *SECONDS)
    idle_seconds: float = number(3.0, *SECONDS)  # to keep a connection; the engines' servers close it after 5 s
    health_seconds: float = number(2.0, *SECONDS)  # between two health checks of a backend
    health_timeout: float = number(5.0, *SECONDS)
    health_failures: int = number(3, 1, 1 << 20)  # failed checks in a row; a refused connection suffices alone
    tokenizer_threads: int = number(2, 1, 1024)
    port: int = number(8080, 0, 65_535, panel="Output", help="Port to listen on; 0: any.")

    def __post_init__(self) -> None:
        if len(self.backends) < 1:
            raise ValueError("there must be at least one backend")
        if len(set(self.backends)) != len(self.backends):
            raise ValueError(f"a backend is given twice: {', '.join(self.backends)}")
        for url in self.backends:
            _check_url(url)
        check_numbers(self)
        if self.max_held < self.max_body:
            raise ValueError(f"max_held must be at least max_body, {self.max_body}, not {self.max_held}")


def _check_url(url: str) -> None:
    example = "give it as http://HOST:PORT"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no backend: {example}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"backend {url!r} has more than a host and a port: {example}")
    try:
        valid = parts.port is None or parts.port > 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"backend {url!r} has no valid port: {example}")
