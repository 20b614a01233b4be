"""What `semmoe swap` and `semmoe adapt` say without a server; with one they run in the engines' suites."""

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from synthetic import make_fingerprint
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.live.client import Served, ServerError
from semmoe.live.status import SwapStatus, plan_name, plan_number, read_status, stage, staged, write_status
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import load_plan, save_plan
from semmoe.settings import SwapSettings
from semmoe.topology import Topology

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path):
    """A control folder of a server on the plan `old`; `new` has two experts of each layer on the other rank."""
    control = tmp_path / "control"
    control.mkdir(mode=0o700)
    plan = vanilla_plan(make_fingerprint(), Topology(ep_size=2))
    rows = np.array([[2, 1, 0, 3], [0, 1, 2, 3]], np.int32)
    save_plan(plan, tmp_path / "old")
    save_plan(replace(plan, placement=replace(plan.placement, physical_to_logical_map=rows)), tmp_path / "new")
    number = stage(load_plan(tmp_path / "old"), control)
    write_status(control, SwapStatus(rank=0, plan=number, expert_bytes=5_000_000))
    return tmp_path


def run(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    return done.exit_code, done.stdout, done.stderr


def test_a_plan_is_staged_for_the_ranks_of_a_node(folder):
    code, out, _ = run("swap", NOWHERE, "--plan", folder / "new", "--control", folder / "control", "--stage-only")
    number = plan_number(load_plan(folder / "new"))
    assert code == 0
    assert plan_name(number) in out
    assert plan_number(staged(folder / "control", number)) == number


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("swap", NOWHERE, "--plan", "new", "--control", "control"), "gives no metrics"),
        (("swap", "ftp://x", "--plan", "new", "--control", "control"), "is not the address of a server"),
        (("swap", NOWHERE, "--plan", "none", "--control", "control"), "no plan at"),
        (("swap", NOWHERE, "--plan", "new", "--control", "nowhere"), "does not exist"),
        (("adapt", NOWHERE, "--control", "nowhere"), "does not exist"),
        (("adapt", NOWHERE, "--control", "control"), "gives no metrics"),
    ],
)
def test_mistakes_end_in_a_line(words, line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, _, err = run(*words)
    assert code == 2
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_a_server_without_a_plan_is_not_adapted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    reason = "this server runs without a plan: start it on one"
    write_status(folder / "control", SwapStatus(rank=0, plan=0, state="refused", reason=reason))
    code, _, err = run("adapt", NOWHERE, "--control", "control")
    assert (code, reason in err) == (2, True)


def test_a_status_that_others_can_write_is_not_trusted(folder):
    path = folder / "control" / "swap-00000.json"
    path.chmod(0o666)
    with pytest.raises(ValueError, match="can be written by others"):
        read_status(folder / "control")


def test_a_disk_without_room_ends_in_a_line(folder, monkeypatch):
    """The plan cannot be staged, so nothing is asked of the server."""
    from semmoe.live import status

    def full(*args):
        raise OSError(28, "No space left on device", str(folder / "control"))

    monkeypatch.setattr(status, "save_plan", full)
    code, _, err = run("swap", NOWHERE, "--plan", folder / "new", "--control", folder / "control", "--stage-only")
    assert code == 1
    assert "No space left on device" in err


class Obedient(BaseHTTPRequestHandler):
    """Takes every order, and has nothing else to say."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"[true]")

    def do_GET(self):
        self._answer(b"")

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Print nothing."""


@pytest.fixture
def obedient():
    """The URL of a server that does nothing; what its ranks do, the test writes in their place."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Obedient)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("last", "told"), [("done", 0), ("failed", 1)])
def test_a_swap_is_over_when_its_last_rank_says_so(folder, obedient, last, told):
    control, number = folder / "control", plan_number(load_plan(folder / "new"))
    serving = read_status(control)
    write_status(control, serving.model_copy(update={"rank": 1}))
    over = serving.model_copy(update={"plan": number, "asked": number, "swaps": 1, "state": "done"})
    timers = []

    def end(rank, state, seconds):
        changed = over.model_copy(update={"rank": rank, "state": state})
        timers.append(threading.Timer(seconds, write_status, (control, changed)))
        timers[-1].start()

    end(0, "done", 0.2)
    end(1, last, 0.8)
    found = Served(obedient, control).swap_sglang(number, SwapSettings(timeout=20), schedules=False)
    assert (found.rank, found.state) == (told, last)
    assert read_status(control, 1).state == last
    for timer in timers:
        timer.join()


def test_a_swap_that_does_not_end_names_the_ranks_it_waits_for(folder, obedient):
    control, number = folder / "control", plan_number(load_plan(folder / "new"))
    late = threading.Timer(0.2, write_status, (control, SwapStatus(rank=0, plan=number, swaps=1, state="done")))
    write_status(control, SwapStatus(rank=1, plan=number, swaps=1, state="moving"))
    late.start()
    with pytest.raises(ServerError, match="within 1 s; rank 0 is done, rank 1 is moving"):
        Served(obedient, control).swap_sglang(number, SwapSettings(timeout=1), schedules=False)
    late.join()
