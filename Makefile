# Two commands for newcomers: `make demo` and `make test`. PYTHON chooses the interpreter (3.10 to 3.13; 3.11 to 3.13
# for SGLang).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
SGLANG_VENV ?= .venv-sglang
SGLANG_PYTHON := $(SGLANG_VENV)/bin/python
SGLANG_PIP := $(SGLANG_PYTHON) -m pip --disable-pip-version-check -q
SGLANG_CPU := engines/sglang-cpu
ON_SGLANG := SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore $(SGLANG_PYTHON)
RESULTS := benchmarks/results
HERE = $(shell uname -m)-$(shell nproc)core_$(shell date +%F)
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.PHONY: demo test test-sglang check bench bench-runtime bench-sglang soak-sglang format clean

demo: $(VENV)/.ready
	$(BIN)/semmoe demo

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest

# On SGLang itself, on the CPU, in an environment of its own, because SGLang pins what it runs with.
test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_PYTHON) -m pytest tests/engines/sglang

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/bench_replay.py

# Both write what they print to benchmarks/results; about 40 minutes on two idle cores, root for the slow networks.
bench-runtime: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_runtime.py | tee $(RESULTS)/runtime_$(HERE).txt
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_end_to_end.py | tee $(RESULTS)/end_to_end_$(HERE).txt

# On SGLang, both write to benchmarks/results too: serving over a slow network, as root; ten thousand requests, checked.
bench-sglang: $(SGLANG_VENV)/.ready
	$(ON_SGLANG) benchmarks/bench_sglang_traffic.py | tee $(RESULTS)/sglang_traffic_$(HERE).txt
	$(ON_SGLANG) benchmarks/bench_sglang.py | tee $(RESULTS)/sglang_$(HERE).txt

soak-sglang: $(SGLANG_VENV)/.ready
	$(ON_SGLANG) benchmarks/soak_sglang.py | tee $(RESULTS)/soak_sglang_$(HERE).txt

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned, so that nothing else chooses its build; one that is there already is kept.
$(VENV)/.ready: pyproject.toml
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install "$(TORCH)"; }
	@echo "installing semmoe and what it needs"
	@$(PIP) install -e ".[transformers]"
	@touch $@

# Triton comes with torch's GPU builds; on other machines the tests of the kernels need it by itself.
$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the test tools"
	@$(PIP) install -e ".[transformers,dev]"
	@$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install --no-deps "$(TRITON)" || echo "no Triton: its tests skip"
	@touch $@

# semmoe pins nothing of the engine that it is installed beside: it finds the versions that it needs, and moves none.
$(SGLANG_VENV)/.ready: pyproject.toml $(wildcard $(SGLANG_CPU)/*.* $(SGLANG_CPU)/*/*.py)
	@test -x $(SGLANG_PYTHON) || $(PYTHON) -c "import sys; sys.version_info < (3, 11) and sys.exit('SGLang needs Python 3.11: set PYTHON')"
	@test -x $(SGLANG_PYTHON) || { echo "creating $(SGLANG_VENV)"; $(PYTHON) -m venv $(SGLANG_VENV); }
	@$(SGLANG_PYTHON) -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(SGLANG_PIP) install "$(TORCH)"; }
	@echo "installing SGLang and what it needs"
	@$(SGLANG_PIP) install -r $(SGLANG_CPU)/requirements.txt
	@$(SGLANG_PIP) install --no-deps -r $(SGLANG_CPU)/requirements-no-deps.txt ./$(SGLANG_CPU)
	@echo "installing semmoe"
	@$(SGLANG_PIP) install -e .
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info
