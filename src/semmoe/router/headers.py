"""HTTP header fields as a proxy must treat them (RFC 9110, section 7.6)."""

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]
RANK = b"x-data-parallel-rank"  # for the OpenAI endpoints of vLLM and SGLang
SGLANG_RANK = b"x-override-routed-dp-rank"  # for SGLang with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1
PROXY = {b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"}
HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", *PROXY}
REPLACED = {b"host", b"expect"}  # `expect` has been answered before a body is forwarded


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The fields that are not limited to one connection, by name or because `connection` lists them."""
    kept = [(name.lower(), value) for name, value in headers]
    named = {option.strip().lower() for name, value in kept if name == b"connection" for option in value.split(b",")}
    return [(name, value) for name, value in kept if name not in HOP_BY_HOP and name not in named]


def to_backend(headers: Headers, host: bytes, length: int | None) -> Headers:
    """The fields of a request as they are forwarded. length: bytes of the body, None if it is streamed."""
    kept = [(name, value) for name, value in end_to_end(headers) if name not in REPLACED]
    if length is not None:
        kept = [(name, value) for name, value in kept if name != b"content-length"]
    if length:
        kept.append((b"content-length", b"%d" % length))
    elif length is None and all(name != b"content-length" for name, _ in kept):
        kept.append((b"transfer-encoding", b"chunked"))
    return [(b"host", host), *kept, (b"via", b"1.1 semmoe")]


def value_of(headers: Headers, name: bytes) -> bytes | None:
    """The value of the first field of that name; names are in lower case."""
    return next((value for found, value in headers if found == name), None)


def named_rank(headers: Headers) -> int | None:
    """The rank that a request names; None if it names none, or no number, which the engine will refuse."""
    for name in (RANK, SGLANG_RANK):
        value = value_of(headers, name)
        if value is not None and value.isdigit() and len(value) < 10:
            return int(value)
    return None


def names_rank(headers: Headers) -> bool:
    """Whether the request has a field for the rank, with any value."""
    return any(name in (RANK, SGLANG_RANK) for name, _ in headers)


def with_rank(headers: Headers, rank: int, path: str) -> Headers:
    value = b"%d" % rank
    added = [(RANK, value), (SGLANG_RANK, value)] if path == "/generate" else [(RANK, value)]
    return [*headers, *added]


def without_rank(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name not in (RANK, SGLANG_RANK)]
