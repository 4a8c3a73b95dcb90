# Everything a newcomer needs: make demo, make test. Only Python 3.11+, pip and make are required.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all check docs format clean fuzz chaos hashes audit lower-bounds

demo: $(READY)  ## train AT and DONE on digits, repair AT, print the table, write the page
	$(BIN)/doubly reproduce demo --output runs/demo

test: $(READY)  ## the tests, about four minutes on two idle cores
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test-all: $(READY)  ## with the slow ones
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m ""

check: $(READY)  ## formatting, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## the documentation site, in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

CALLS ?= 5000
fuzz: $(READY)  ## malformed calls of every public function: none may end in an error from inside torch
	PYTHONPATH=tests/support $(BIN)/python tests/support/malformed_calls.py --calls $(CALLS)

SEED ?= 0
SCALE ?= 1
chaos: $(READY)  ## malformed calls, damaged and hostile files, kills: about ten minutes on two cores; writes docs/reliability.md
	$(BIN)/python -m tests.chaos --seed $(SEED) --scale $(SCALE)

hashes: $(READY)  ## requirements-hashes.txt anew from constraints.txt; needs pypi.org
	$(BIN)/python tools/pin_hashes.py

audit: $(READY)  ## known vulnerabilities of the pinned versions, by pip-audit if it is installed
	@$(BIN)/python tools/audit.py

LOWEST := build/lower-bounds
lower-bounds:  ## a fast part of the tests with the lowest versions that pyproject.toml allows, beside the pinned torch
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tools/lower_bounds.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST)/requirements.txt
	PYTHONPATH=src $(LOWEST)/bin/python -m pytest -W default tests/bilevel tests/report tests/data tests/cli tests/test_*s.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch first and alone: with the pin in place no other package pulls a different build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
