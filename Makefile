# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
# Debian's Python is built with PGO, which makes the decoders 1.5x faster than a plain build: it comes first.
PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
ARGS ?=
.DEFAULT_GOAL := help

.PHONY: help
help: ## Print these lines.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.venv/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed: install it, or say PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

.PHONY: install
install: .venv/.installed ## Make .venv with everything that is needed.

.PHONY: demo
demo: .venv/.installed ## Run the whole pipeline on an embedded stack; ARGS="--seconds 60 --chaos -o json".
	@$(BIN)/anabranch demo $(ARGS)

.PHONY: check
check: format-check lint types layers test ## Run what CI runs: format, lint, types, layers, tests.

.PHONY: test
test: .venv/.installed ## Run the tests on a real broker, PostgreSQL and Spark; ARGS="-k cut".
	$(BIN)/pytest $(ARGS)

.PHONY: chaos
chaos: .venv/.installed ## Run the long crash matrix.
	ANABRANCH_CHAOS=long $(BIN)/pytest tests/chaos $(ARGS)

.PHONY: bench
bench: .venv/.installed ## Measure against peers side by side; ARGS="--only source-10-row -o json".
	@$(BIN)/python -m bench $(ARGS)

.PHONY: format
format: .venv/.installed ## Format the code.
	$(BIN)/ruff format . && $(BIN)/ruff check --fix --quiet .

.PHONY: format-check
format-check: .venv/.installed ## Fail if a file is not formatted.
	$(BIN)/ruff format --check .

.PHONY: lint
lint: .venv/.installed ## Run ruff with everything on.
	$(BIN)/ruff check .

.PHONY: types
types: .venv/.installed ## Check types strictly.
	$(BIN)/mypy
	$(BIN)/mypy tests bench

.PHONY: layers
layers: .venv/.installed ## Check that imports run one way.
	$(BIN)/lint-imports

.PHONY: wheel
wheel: .venv/.installed ## Build the wheel into dist/.
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

.PHONY: clean
clean: ## Remove what was built; servers started by `anabranch dev up` go on.
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
