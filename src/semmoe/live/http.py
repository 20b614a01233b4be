"""Requests to a running server: the headers that a gateway asks for, and answers with a bound."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import SplitResult, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

MAX_ANSWER_BYTES = 1 << 26  # of a page of counters; those of 64 ranks with all pairs have about 2 MB
MIN_SECRET = 6  # characters; shorter words of a header are not looked for in messages
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name (RFC 9110)
OF_THE_CONNECTION = {"host", "connection", "content-length", "transfer-encoding"}


class _NoRedirects(HTTPRedirectHandler):
    """Makes a redirect an error, since another server must not get the headers."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Client:
    """How servers are asked. headers: sent with every request."""

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def read(self, url: str, seconds: float, data: bytes | None = None) -> bytes:
        """The answer to a GET, or to a POST of JSON. Raises OSError or HTTPException."""
        request = Request(url, data, {"Content-Type": "application/json", **self.headers})
        with build_opener(_NoRedirects()).open(request, timeout=seconds) as answer:
            content = answer.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise OSError(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MB")
        return content

    def reason(self, error: OSError | HTTPException) -> str:
        """Why a request failed, without the values of headers, which a server may repeat."""
        text = str(getattr(error, "reason", "") or error or type(error).__name__)
        if isinstance(error, HTTPError):
            target = error.headers.get("Location")
            text = f"{error.code} {text}" + (f", a redirect to {target}: give that address" if target else "")
        return self.hide(text)

    def hide(self, text: str) -> str:
        """The text without the words of headers' values."""
        for word in " ".join(self.headers.values()).split():
            text = text.replace(word, "...") if len(word) >= MIN_SECRET else text
        return text


PLAIN = Client()


def make_client(headers: Sequence[str], key: str = "") -> Client:
    """Make a client. Raises ValueError, without the value of a header, if no request can carry a header.

    headers: "NAME:VALUE"; key: an API key, unless a header says Authorization.
    """
    parsed: dict[str, str] = {}
    own = [f"Authorization:Bearer {key}"] if key else []
    for header in [*own, *headers]:
        name, colon, value = header.partition(":")
        if not colon or not TOKEN.fullmatch(name) or name.lower() in OF_THE_CONNECTION:
            raise ValueError("--header must be NAME:VALUE, with the name of a header that a client may set")
        if not value.isprintable() or not value.isascii():
            raise ValueError(f"the value of header {name} must be printable ASCII in one line")
        parsed[name.lower()] = value.strip()
    return Client(headers=parsed)


def split_address(url: str) -> SplitResult:
    """Split a server's address into parts. Raises ValueError if it is not an HTTP address."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.username is not None:
        raise ValueError("an address holds no user or password: give --header")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url} is not the address of a server")
    return parts
