# make run    train a small Llama 3 on this machine, through two faults, and show the report's path
# make install-megatron   what recipes with trainer=megatron need besides
# make test   everything that a change has to pass
# make test-long   that and what takes longer, part by part; PART=... for one of them
# make mutants  break lines that carry an invariant, one at a time: a test beside each has to fail;
#             ARGS="WORD ..." for those whose file or name holds one of the words
# make golden write what recipes render to tests/golden, and print how the texts that are kept as
#             digests have changed; ARGS=REVISION prints how all differ from those of a commit
# make check  format, lint, types and import contracts alone
# make image  the image that Kubernetes manifests name, with docker, podman or buildah;
#             ACCELERATOR=cuda for GPUs, BASE=... for another image to start from
#
# Nothing has to be there beforehand but Python and a package index.

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
# An index that carries torch's builds without CUDA, where pip's own does not.
TORCH_INDEX ?=
# What docker/Dockerfile takes; where a value is empty, the Dockerfile's default holds.
ACCELERATOR ?=
BASE ?=
RECIPE ?= llama/llama3_tiny_checkpointless
ARGS ?=
# So many tests run beside each other. They wait more than they compute: two leave two cores idle.
TEST_JOBS ?= 3
PARALLEL := --numprocesses=$(TEST_JOBS) --dist=worksteal --judge

# Every test file belongs to one part of make test-long, by the folder that it lies in.
PART_recovery := tests/scenarios/recovery tests/scenarios/protection tests/scenarios/frameworks --ignore=tests/scenarios/recovery/test_random.py
PART_elastic := tests/scenarios/elastic
PART_random := tests/scenarios/recovery/test_random.py
PART_training := tests/recipes_training tests/scenarios/tiered tests/scenarios/mmap --ignore=tests/recipes_training/megatron
PART_megatron := tests/recipes_training/megatron tests/scenarios/megatron
PART_tiered := tests/resilience/tiered tests/scenarios/memoryd
PART_data := tests/resilience/data
PART_agent := tests/resilience tests/scenarios/agents --ignore=tests/resilience/tiered --ignore=tests/resilience/data
PART_membership := tests/scenarios/membership tests/scenarios/simulation --ignore=tests/scenarios/simulation/test_model.py --ignore=tests/scenarios/simulation/test_random.py
PART_model := tests/scenarios/simulation/test_model.py tests/scenarios/simulation/test_random.py
PART_runs := tests/scenarios/first_run tests/scenarios/k8s tests/scenarios/local_runs tests/scenarios/operators tests/scenarios/pages tests/scenarios/scripts tests/scenarios/slurm
PART_rest := tests --ignore=tests/recipes_training --ignore=tests/resilience --ignore=tests/scenarios
PARTS := recovery elastic random training megatron tiered data agent membership model runs rest
PART ?= $(PARTS)
ifneq ($(filter-out $(PARTS),$(PART)),)
$(error PART is '$(PART)'; allowed: $(PARTS))
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run install install-megatron check format test test-long mutants golden bench image clean

run: $(VENV)/.train
	$(BIN)/python -m launcher recipe=$(RECIPE) action=run $(ARGS)

install: $(VENV)/.train

install-megatron: $(VENV)/.train
	$(PIP) install -e '.[train,megatron]'

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$$($(PYTHON) --version) is too old: this needs Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Where there is no NVIDIA driver, torch comes without gigabytes of CUDA packages.
$(VENV)/.torch: $(VENV)/.python
	@scripts/install-torch.sh $(BIN)/python $(TORCH_VERSION) "$(TORCH_INDEX)"
	@touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	$(PIP) install -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) install -e '.[dev]'
	@scripts/install-test-tools.sh
	@scripts/install-aws-model.sh "$(PYTHON)"
	@scripts/install-aws-checkpointing.sh $(BIN)/python
	@touch $@

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(ARGS)

test-long: check
	@scripts/install-torch-tests.sh $(BIN)/python
	@scripts/install-frameworks.sh $(BIN)/python
	@scripts/install-aws-agent.sh $(BIN)/python
	@echo "parts: $(PARTS); for one of them alone: make test-long PART=NAME"
	@failed=; for part in $(PART); do \
	  $(MAKE) --no-print-directory "part-$$part" || failed="$$failed $$part"; \
	done; [ -z "$$failed" ] || { echo "parts that failed:$$failed" >&2; exit 1; }

part-%:
	$(BIN)/python -m pytest --hypothesis-profile=searching $(PARALLEL) $(PART_$*) $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(ARGS)

golden: $(VENV)/.dev
	$(BIN)/python -m tests.launcher.golden $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/render.py

image:
	@scripts/build-image.sh "TORCH_VERSION=$(TORCH_VERSION)" "TORCH_INDEX=$(TORCH_INDEX)" \
	  "PIP_INDEX_URL=$(PIP_INDEX_URL)" "ACCELERATOR=$(ACCELERATOR)" "BASE=$(BASE)"

clean:
	rm -rf $(VENV) .venv-aws .venv-aws-agent .venv-aws-tiered .venv-torch-tests .venv-torch-older .venv-frameworks build dist .pytest_cache .mypy_cache .ruff_cache
