# One environment, .venv, in two sizes: `make demo` installs what the library needs, `make test` adds torch and the test tools.
# The stamps inside it make a second run install nothing; a change of pyproject.toml or constraints.txt brings it up to date.

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
STAMPS := .venv/stamps
PIP_INSTALL := $(BIN)/python -m pip --quiet --quiet --no-input --disable-pip-version-check install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --quiet
SOURCES := archive resharding

.NOTPARALLEL: # two pips in one environment would damage it
.PHONY: demo test lint fmt docs bench soak clean

demo: $(STAMPS)/core
	@$(BIN)/archive demo </dev/null

test: lint
	@$(PYTEST) --numprocesses $(WORKERS) </dev/null

lint: $(STAMPS)/test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --strict --no-error-summary $(SOURCES)

fmt: $(STAMPS)/test
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: $(STAMPS)/core
	@$(BIN)/python -m archive.cli.reference README.md

bench: $(STAMPS)/test
	@$(PYTEST) -m bench --timeout 0 --capture no tests/benchmarks </dev/null

soak: $(STAMPS)/test
	@$(PYTEST) -m soak --timeout 0 </dev/null

clean:
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -m venv --clear .venv </dev/null
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: pyproject.toml constraints.txt | $(STAMPS)/venv
	@$(PIP_INSTALL) --editable . </dev/null
	@touch $@

# torch first and pinned, so that nothing that needs it chooses another build
$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@$(PIP_INSTALL) torch </dev/null
	@touch $@

# the larger installation contains the smaller one, hence both stamps; of RLinf only the buffer is used, without what trains on GPUs
$(STAMPS)/test: pyproject.toml constraints.txt $(STAMPS)/torch | $(STAMPS)/venv
	@$(PIP_INSTALL) --editable '.[test]' </dev/null
	@$(PIP_INSTALL) --no-deps rlinf==0.3.0 </dev/null
	@touch $(STAMPS)/core $@
