# Two commands for users: `make demo` and `make test`. Everything else is for people who change the project.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
SBOM ?= sbom.json
# What takes long comes first: at the end there is something short left for whoever is done.
SUITE := tests/chaos tests/integration tests/gpu tests/contract tests/golden tests/unit

.PHONY: help env demo test unit check types lint contracts spelling docs format chaos seeds mutants bench gpu sbom audit newest picture clean

help:  ## Show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(READY)  ## Make the environment in .venv/

$(READY): pyproject.toml .ci/hashes.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $$($(PYTHON) --version) was found. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { echo "The venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@awk '/^[a-z]/ {on = /^uv==/} on' .ci/hashes.txt > .venv/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement .venv/uv.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python \
	  --constraints .ci/hashes.txt --build-constraints .ci/hashes.txt --group dev -e .
	@touch $@

demo: $(READY)  ## Run the digits sweep to its end and say how to look at it
	@if [ -e runs/digits/sweep.yaml ]; then $(BIN)/sweep resume digits; \
	 else $(BIN)/sweep run sweeps/examples/digits.yaml; fi

test: $(READY)  ## Run the tests and the fault matrix's slice, two files at a time
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(SUITE)

unit: $(READY)  ## Run the quick tests only
	$(BIN)/python -m pytest tests/unit tests/contract tests/golden

check: $(READY)  ## Lint, types, import contracts, spelling, and the documents as a site
	$(MAKE) --jobs 2 --output-sync types docs lint contracts spelling

types: $(READY)
	$(BIN)/mypy

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

contracts: $(READY)
	$(BIN)/lint-imports

spelling: $(READY)
	$(BIN)/codespell

docs: $(READY)  ## Build the documents as a site in site/; a broken link or a public name without a docstring fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(READY)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(READY)  ## Run the fault matrix, all of it, and print its table (CHAOS=row_34: a part)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --verbose -m 'chaos or fault' $(if $(CHAOS),-k $(CHAOS)) tests

seeds: $(READY)  ## Show which test shows which row of the seed documents
	$(BIN)/python -m tests.seeds

mutants: $(READY)  ## Break the code in named places, and say which breaks the tests see (PART=store: some)
	$(BIN)/python -m tests.mutants $(PART)

bench: $(READY)  ## Measure, and print one table (ROW=step: one row of it)
	$(BIN)/python -m tests.bench $(if $(ROW),--only $(ROW))

gpu: $(READY)  ## Run the tests that need a GPU
	$(BIN)/python -m pytest tests/gpu

sbom: $(READY)  ## List what is installed in sbom.json, as CycloneDX (fetches its tool; SBOM=FILE: another file)
	$(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml \
	  --output-reproducible --output-format JSON --output-file $(SBOM) $(BIN)/python

# pip-audit reads no SBOM: it is given the SBOM's names and versions. What stands behind a version's
# `+` says where a package was built; the database knows versions without it.
audit: sbom  ## Look for known holes in what sbom.json lists (asks a database on the network)
	listed=$$($(BIN)/python -c 'import json, sys; \
	  parts = json.load(open(sys.argv[1]))["components"]; \
	  print(*(part["name"] + "==" + part["version"].partition("+")[0] for part in parts), sep="\n")' $(SBOM)) && \
	echo "$$listed" | $(BIN)/uv tool run pip-audit --strict --no-deps --disable-pip --requirement /dev/stdin

# A copy of .venv/ in which these libraries and what they need are as new as the index has them;
# pyproject.toml's upper bounds do not hold there. torch keeps its version: another one means several
# GB of CUDA libraries. To try it: make newest NEWEST='torch torchvision'
NEWEST ?= ray[tune] optuna mlflow

newest: $(READY)  ## Run the contract tests with the newest Ray, Optuna and MLflow (NEWEST=...: with others)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .newest
	$(BIN)/uv pip install --quiet --python .newest/bin/python \
	  --constraints .ci/hashes.txt --build-constraints .ci/hashes.txt --group dev -e .
	grep '^torch' .ci/constraints.txt > .newest/kept.txt
	$(BIN)/uv pip install --quiet --python .newest/bin/python --upgrade $(NEWEST:%='%') \
	  $(if $(filter torch%,$(NEWEST)),,--constraints .newest/kept.txt)
	@failed=0; .newest/bin/python -m pytest tests/contract || failed=1; \
	echo "Tried: $$($(BIN)/uv pip freeze --quiet --python .newest/bin/python | grep -E '^(ray|optuna|mlflow|torch|torchvision)==' | tr '\n' ' ')"; \
	exit $$failed

picture: $(READY)  ## Take the documents' pictures of a sweep's page again, from the demo's sweep
	$(BIN)/python -m tests.integration.ui_screenshot

clean:  ## Remove the environment and all caches, but no sweep
	rm -rf .venv .newest site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
