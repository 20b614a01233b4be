"""What holds of every engine's start: one that does not fit ends with a line that says why; a broken one is noticed."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import requests
from serving import SEMMOE, Server, reason

from semmoe.cli.demo import MODEL
from semmoe.engines import ownership
from semmoe.engines.hooks import Hook, problem
from semmoe.engines.transformers import verify
from semmoe.plan import load_plan, save_plan

BROKEN = Path(__file__).parent / "broken"  # a plug-in of all engines
UNMOVED = Path(__file__).parent / "unmoved"
STALE = Path(__file__).parent / "stale"  # another


class StartTests:
    """A subclass says which server and engine, and where its adaptor reaches into the engine."""

    SERVER: type[Server]
    ENGINE: str
    HOOKS: tuple[Hook, ...]

    def test_every_hook_fits_this_version(self):
        assert [line for line in map(problem, self.HOOKS) if line] == []

    def test_the_negative_control_fails(self, plans, model, prompts, reference, tmp_path):
        """Tokens that come back in another order change outputs, as the other tests of outputs would see."""
        server = self.SERVER(tmp_path, str(MODEL), "--plan", plans["tp2"], path=str(BROKEN))
        try:
            outputs = server.wait().complete(prompts)
        finally:
            server.stop()
        assert not verify.compare_outputs(model, prompts, reference, outputs).holds

    @pytest.mark.costly
    def test_a_slot_that_does_not_move_ends_the_server(self, plans, swap_plans, prompts, tmp_path, monkeypatch):
        """The negative control of swaps: what lies in a slot is checked before a token meets it."""
        server, answers = self.spoilt_swap("slot", plans, swap_plans, prompts, tmp_path, monkeypatch)
        line = server.log.strip().splitlines()[-1]
        assert "the weights of expert" in line
        assert "in slot 0 differ from those before the move" in line
        assert not answers or answers[0].status_code >= 400, answers[0].text

    @pytest.mark.costly
    def test_a_rank_that_dies_between_two_steps_ends_the_server(
        self, plans, swap_plans, prompts, tmp_path, monkeypatch
    ):
        self.spoilt_swap("death", plans, swap_plans, prompts, tmp_path, monkeypatch)

    def spoilt_swap(self, how, plans, swap_plans, prompts, tmp_path, monkeypatch):
        """The server, which ends, and what it answered to a request after it was told to swap."""
        monkeypatch.setenv("UNMOVED", how)
        server = self.SERVER(tmp_path, str(MODEL), "--plan", plans["dp2"], path=str(UNMOVED)).wait()
        try:
            words = [sys.executable, *SEMMOE, "swap", server.url, "--plan", swap_plans["dp2"][1]]
            words += ["--control", str(server.control), "--layers-per-pass", "1"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 1, done.stdout
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
            answers = []
            with contextlib.suppress(requests.RequestException):
                answers.append(server.send(prompts[3]))
            server.process.wait(timeout=100)
            assert server.ranks() == []
        finally:
            server.stop()
        return server, answers

    def test_a_plan_of_another_model_does_not_start(self, plans, tmp_path):
        plan = load_plan(plans["tp2"])
        save_plan(replace(plan, fingerprint=replace(plan.fingerprint, architecture_hash="0" * 64)), tmp_path / "other")
        assert "architecture_hash" in reason(self.SERVER(tmp_path, str(MODEL), "--plan", str(tmp_path / "other")))

    @pytest.mark.costly  # that ranks compare their plans is held by tests/test_agreement.py, too
    def test_a_rank_with_another_plan_does_not_start(self, plans, tmp_path, monkeypatch):
        """Of equal sizes: only the scores of tokens differ, so that nothing else would fail."""
        monkeypatch.setenv("STALE_PLAN", str(save_stale(plans["tp2"], tmp_path / "stale")))
        server = self.SERVER(tmp_path, str(MODEL), "--plan", plans["tp2"], path=str(STALE), forks=False)
        line = reason(server)
        assert "ranks disagree: the plan of rank 1 is not that of rank 0" in line

    def test_an_unknown_setting_does_not_start(self, tmp_path, monkeypatch):
        """The entry point ends the process that calls it, as the engine's processes do."""
        monkeypatch.setenv("SEMMOE_PLANN", "x")
        program = f"from semmoe.engines.{self.ENGINE}.plugin import register; register()"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "SEMMOE_PLANN is not a setting" in done.stderr.splitlines()[-1]

    def test_a_folder_in_use_is_left_alone(self, tmp_path):
        """Not even a dry run touches what a running server has there."""
        server = self.SERVER(tmp_path, str(MODEL))
        (server.control).mkdir(mode=0o700, exist_ok=True)
        held = ownership.claim(server.control)
        try:
            assert "is in use by a running server" in reason(server)
        finally:
            os.close(held)


def save_stale(path: str, out: Path) -> Path:
    """A plan that sends tokens to the other one of two ranks."""
    plan = load_plan(path)
    shuffle = plan.tokens
    swapped = np.ascontiguousarray(shuffle.token_scores[..., ::-1])
    save_plan(replace(plan, tokens=replace(shuffle, token_scores=swapped)), out)
    return out
