"""Addresses of ranks and of the picker, as gateways compare them."""

import ipaddress
import socket
from collections.abc import Sequence


def addresses_of(given: Sequence[str], num_ranks: int) -> list[str]:
    """Return the address of each rank, with its host as a number, which gateways compare. Raises ValueError."""
    found = [_resolved(address) for address in given]
    if len(set(found)) != len(found):
        raise ValueError(f"an address is given twice: {', '.join(given)}")
    if len(found) not in (1, num_ranks):
        words = f"the plan has {num_ranks} data-parallel ranks, and {len(found)} addresses came"
        raise ValueError(f"{words}: give one for each, or a single server")
    return found * num_ranks if len(found) == 1 else found


def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise ValueError(f"{address!r} is not an address: give HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host of {address} is not known: {error.strerror or error}") from None
    return address_of(str(min(found)[4][0]), int(port))  # of several, the first of IPv4


def address_of(host: str, port: int) -> str:
    """Return HOST:PORT, with a host of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
