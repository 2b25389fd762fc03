# make demo | test | quick | test-gpu | check | docs | bench | fuzz; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the site is built from the sources alone: what builds it needs neither torch nor multigemm installed
DOCS := .venv-docs
# processes that test beside the one that interprets: with it one more than two cores, because some tests wait
WORKERS := 2
# of the cores, for each of them: threads of several that spin for one core hold each other up
SHARE = $(shell echo $$(( ($$(nproc) + 1) / 2 )))

# Python keeps the byte code of what it imports, a third of what pip would compile before the first test
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: installed demo test quick test-gpu check docs bench fuzz clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e ".[dev]"
	touch $@

installed: $(STAMP)  ## .venv alone

demo: $(STAMP)  ## every backend solves and cross-checks one jagged problem, on whatever is here
	MULTIGEMM_EMULATE=1 $(BIN)/python -m multigemm demo

# a process of triton interprets or compiles; test_lists' interprets, then compiles. Each process imports all that it tests.
# numba's tests share a process: a device function that several kernels call is compiled once in each
NOT_INTERPRETED := --ignore-glob '*/triton/test_*interprete*.py' --ignore-glob '*/triton/test_lists.py'
test: $(STAMP)  ## the whole suite
	said=$$(mktemp); trap 'pkill -P $$others; exit 130' INT TERM; \
	for part in triton/test_lists.py 'triton/test_*interprete*.py' numba; do \
		OMP_NUM_THREADS=$(SHARE) $(BIN)/python -m pytest -q tests/backends/$$part || exit; done >$$said 2>&1 & others=$$!; \
	OMP_NUM_THREADS=$(SHARE) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(NOT_INTERPRETED) \
		--ignore tests/backends/numba $(ARGS); \
	code=$$?; wait $$others || code=1; cat $$said; rm $$said; exit $$code

quick: $(STAMP)  ## what a contributor runs first: no compiler, no interpreter, no other process, under a minute
	OMP_NUM_THREADS=$(SHARE) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu" \
		$(NOT_INTERPRETED) $(ARGS)

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(STAMP)  ## style, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DOCS)/.installed  ## the documentation site, into site/; a warning or a dead link fails
	$(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material mkdocstrings-python ruff
	touch $@

bench: $(STAMP)  ## the benchmark; ARGS="--suite moe"
	$(BIN)/python -m multigemm bench $(ARGS)

fuzz: $(STAMP)  ## the fuzzer; ARGS="--seconds 60"
	MULTIGEMM_EMULATE=1 $(BIN)/python -m multigemm fuzz $(ARGS)

clean:
	rm -rf $(VENV) $(DOCS) .test_cache site build dist *.egg-info
