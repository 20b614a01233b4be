"""What users call, on a real engine of two ranks: refusals, forwards, profiling."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from semmoe.cli.demo import MODEL
from semmoe.core import Topology
from semmoe.engines.transformers import recorder as plain_recorder
from semmoe.engines.transformers.model import load_model
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solver import solve

pytestmark = pytest.mark.dist
EASY = CoclusterSettings(starts=1, steps=10)


class Job:
    """A function of a communicator and what it needs, as `on_ranks` wants it."""

    def __init__(self, function, *given):
        self.function, self.given, self.__name__ = function, given, function.__name__

    def __call__(self, comm):
        return self.function(comm, *self.given)


@pytest.fixture(scope="module")
def plan(model, texts, tmp_path_factory):
    trace = plain_recorder.record(model, str(MODEL), texts[32:60], tmp_path_factory.mktemp("trace"))
    return solve(trace, Topology(ep_size=2), SolveSettings(cocluster=EASY))


def refusals(comm, plan):
    from deepspeed import comm as ds

    from lab import deepspeed as offline
    from semmoe.engines import deepspeed as adaptor

    def said(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        return "nothing"

    model = load_model(str(MODEL))
    out = [said(lambda: adaptor.apply_plan(model, plan))]
    engine = offline.initialize(model, plan)
    assert ds.is_initialized()
    out.append(said(lambda: adaptor.apply_plan(engine, plan, shuffle="often")))
    other = vanilla_plan(plan.fingerprint, Topology(ep_size=4, dp_size=2))
    out.append(said(lambda: adaptor.apply_plan(engine, other)))
    adaptor.apply_plan(engine, plan)
    out.append(said(lambda: adaptor.apply_plan(engine, plan)))
    out.append(said(lambda: engine.save_checkpoint("x")))
    out.append(said(lambda: engine.module(inputs_embeds=torch.zeros(1, 2, 192))))
    return out


def test_what_does_not_fit_is_said(plan, tmp_path):
    said = on_ranks(2, Job(refusals, plan), tmp_path)
    for words in said:
        for line, expected in zip(words, [
            "no MoE layer of this model was converted by AutoEP", "shuffle must be one of predicted, off",
            "the plan is for autoep_size 4 and autotp_size 2, DeepSpeed runs 2 and 2", "on a plan already",
            "DeepSpeed's checkpoints do not know", "needs input_ids",
        ], strict=True):  # fmt: skip
            assert expected in line


def generated(comm, plan, prompt, shuffle):
    from lab import deepspeed as offline
    from semmoe.engines.deepspeed import apply_plan

    engine = offline.initialize(load_model(str(MODEL)), plan)
    planned = apply_plan(engine, plan, shuffle=shuffle)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = engine.module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
                                     pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist(), planned.costs().sent, planned.rows.passes


def test_generate_of_transformers_runs_on_the_plan(plan, prompts, reference, tmp_path):
    for tokens, sent, passes in on_ranks(2, Job(generated, plan, prompts[3], "predicted"), tmp_path):
        assert tokens == reference[3]
        assert sent["reduce_scatter"] > 0
        assert sent["all_reduce"] < 100  # DeepSpeed compares the ranks' first input
        assert passes == {"shuffled": 8}


def test_the_example_of_the_docs_runs_as_users_start_it(plan, prompts, reference, tmp_path):
    """By torchrun, on two ranks."""
    docs = (Path(__file__).parents[3] / "docs/support.md").read_text()
    code = re.search(r"^```python\n(import deepspeed.*?)^```", docs, re.M | re.S)[1]
    given = f"torch.tensor([{prompts[3]}]), max_new_tokens=8, do_sample=False, pad_token_id=0"
    save_plan(plan, tmp_path / "plan")
    for name, value in (('"MODEL"', repr(str(MODEL))), ("generate(...)", f"generate({given})")):
        assert name in code
        code = code.replace(name, value)
    code = code.replace("engine.module.generate", "out = engine.module.generate")
    # Else DeepSpeed compiles collectives of its own, which takes a while and a compiler.
    first = 'import torch\nimport deepspeed.ops\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
    # Each rank writes a file of its own: what two print at once is mixed up.
    answer = f"str(out[0, {len(prompts[3])}:].tolist())"
    last = f"import os, pathlib\npathlib.Path('tokens' + os.environ['RANK']).write_text({answer})\n"
    (tmp_path / "script.py").write_text(f"{first}{code}\n{last}")
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = subprocess.run([*run, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [(tmp_path / f"tokens{rank}").read_text() for rank in range(2)] == [str(reference[3])] * 2
