"""A slow network on one machine: every host a network namespace of its own, links held at a rate by the kernel.

    python benchmarks/serving/network.py --hosts 2 --rate 200mbit [--nodes 2] -- COMMAND ...

Runs COMMAND once on each host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set and a
/dev/shm of its own, as on machines that share nothing; ends all of them when one fails, with its exit code. Benchmarks
use `slow_network` with `enter` or `command_on` instead. Needs root, iproute2 and the kernel's veth, bridge and tbf; all
that it makes is gone when it ends, and what a killed run left is removed by the next.

Uniform (one node): every host's link carries `rate` each way. Two tiers: hosts are grouped in nodes, side by side;
inside a node links carry `inside`, and each node's one uplink carries `rate` each way for all of its hosts.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE = "eth0"  # of each host
PORT = "29511"
NETNS = Path("/run/netns")
CLONE_NEWNET = 0x40000000
PREFIX = "semmoe"


class NetworkError(Exception):
    """Why no slow network can be made here."""


@dataclass(frozen=True)
class Network:
    hosts: int
    rate: str  # in tc's units, such as 200mbit or 1gbit
    nodes: int = 1
    inside: str = "10gbit"
    owner: int = 0  # process id, part of every name
    slow: tuple[tuple[int, str], ...] = ()  # hosts whose links carry another rate than the others'

    def __str__(self) -> str:
        return f"{self.rate}, uniform" if self.nodes == 1 else f"{self.rate} between {self.nodes} nodes"

    def namespace(self, host: int) -> str:
        return f"{PREFIX}-{self.owner}-{host}"

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return f"{PREFIX}-{self.owner}-switch"

    def node(self, host: int) -> int:
        return host // (self.hosts // self.nodes)

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def slow_network(
    hosts: int, rate: str, nodes: int = 1, inside: str = "10gbit", slow: tuple[tuple[int, str], ...] = ()
) -> Iterator[Network]:
    """Namespaces for `hosts` while the block runs; slow: (host, rate of its link). Raises NetworkError, ValueError."""
    if hosts < 1 or nodes < 1 or hosts % nodes:
        raise ValueError(f"{hosts} hosts cannot be grouped in {nodes} nodes of one size")
    _check()
    _remove_stale()
    network = Network(hosts, rate, nodes, inside, os.getpid(), slow)
    before = signal.signal(signal.SIGTERM, _stop)  # so that `finally` runs
    try:
        _build(network)
        yield network
    finally:
        for name in (*map(network.namespace, range(hosts)), network.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.signal(signal.SIGTERM, before)


def set_rate(network: Network, rate: str) -> None:
    """Give every host's link another rate, while processes run on a uniform network."""
    for host in range(network.hosts):
        for namespace, device in ((network.namespace(host), DEVICE), (network.switch, f"host{host}")):
            _hold(namespace, device, rate, "replace")


def enter(network: Network, host: int) -> None:
    """Move this process, which must not have threads that talk already, to the host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NETNS / network.namespace(host)).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {network.namespace(host)}")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _check() -> None:
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root")
    if missing:
        raise NetworkError(f"{', '.join(missing)} not found: install iproute2 and util-linux")


def _remove_stale() -> None:
    for path in NETNS.glob(f"{PREFIX}-*"):
        owner = path.name.split("-")[1]
        if not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(words)}: {done.stderr.strip()}")


def _build(network: Network) -> None:
    switch = network.switch
    _run("ip", "netns", "add", switch)
    for n in range(network.nodes):
        _run("ip", "-n", switch, "link", "add", f"node{n}", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", f"node{n}", "up")
    for host in range(network.hosts):
        _plug_in(network, host)
    if network.nodes > 1:
        _run("ip", "-n", switch, "link", "add", "core", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "core", "up")
        for n in range(network.nodes):
            _uplink(network, n)


def _plug_in(network: Network, host: int) -> None:
    """A host's namespace and its link to the bridge of its node."""
    name, switch, port = network.namespace(host), network.switch, f"host{host}"
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", name, "addr", "add", f"{network.address(host)}/24", "dev", DEVICE)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "set", DEVICE, "up")
    _run("ip", "-n", switch, "link", "set", port, "master", f"node{network.node(host)}", "up")
    rate = dict(network.slow).get(host, network.rate if network.nodes == 1 else network.inside)
    _hold(name, DEVICE, rate)
    _hold(switch, port, rate)


def _uplink(network: Network, node: int) -> None:
    ends = (f"up{node}", f"down{node}")
    _run("ip", "-n", network.switch, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for end, bridge in zip(ends, (f"node{node}", "core"), strict=True):
        _run("ip", "-n", network.switch, "link", "set", end, "master", bridge, "up")
        _hold(network.switch, end, network.rate)


def _hold(namespace: str, device: str, rate: str, verb: str = "add") -> None:
    """What leaves `device`: at most `rate`, a queue of 100 ms, bursts of two of the largest packets."""
    _run("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf", "rate", rate, "burst", "128kb",
         "latency", "100ms")  # fmt: skip


def run_everywhere(network: Network, command: Sequence[str]) -> int:
    """Run a command on every host; the exit code of the first that fails, or 0."""
    places = [(command_on(network, h, command), environment_of(network, h)) for h in range(network.hosts)]
    processes = [subprocess.Popen(words, env=environment, start_new_session=True) for words, environment in places]
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(0.05)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def command_on(network: Network, host: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on the host; to be started with `environment_of` the host."""
    # An engine that sees a peer's shared memory takes it for a local process.
    own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    return ["ip", "netns", "exec", network.namespace(host), *own_memory, *command]


def environment_of(network: Network, host: int) -> dict[str, str]:
    return {
        **os.environ, "RANK": str(host), "WORLD_SIZE": str(network.hosts), "MASTER_ADDR": network.address(0),
        "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": DEVICE, "HOST_ADDR": network.address(host),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="200mbit", help="of a host's link, or of a node's uplink: 200mbit, 1gbit")
    parser.add_argument("--nodes", type=int, default=1, help="above 1: two tiers")
    parser.add_argument("--inside", default="10gbit", help="of a host's link where there are nodes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    a = parser.parse_args()
    command = a.command[1:] if a.command[:1] == ["--"] else a.command
    if not command:
        parser.error("name a command after --")
    try:
        with slow_network(a.hosts, a.rate, a.nodes, a.inside) as network:
            return run_everywhere(network, command)
    except (NetworkError, ValueError) as error:
        print(f"network.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
