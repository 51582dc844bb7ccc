# The first target that needs it builds .venv. Tools are started from .venv/bin, not with `python -m`,
# which would put the repository's root on sys.path (see kernels/README.md).
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# A hanging test fails after this many seconds instead of holding everything up. Two processes share
# the tests: an idle one takes over half of the tests that the other still has.
# RECORD=docs/tested-versions.json adds a row on this environment to the table of versions.
RECORD ?=
PYTEST := $(BIN)/pytest --timeout 300 -n 2 --dist worksteal $(if $(RECORD),--record-versions $(RECORD))
# Kernels that many tests need are compiled before the tests: two processes of pytest would both
# compile most of them.
WARMED := .cache/numba/.warm
# Tests start dozens of processes: each would compile our sources anew where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-integrations test-all test-gpu bench-gpu check fix bench docs build release clean help

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all]"
	touch $@

demo: $(STAMP) ## train the two demo models with and without cswap; results in demo-out/
	$(BIN)/cswap warm --jobs 2 --dtype float32 --dtype int64 --dtype bool bitpack zvc+expk int8
	$(BIN)/python -m bench demo

$(WARMED): $(STAMP)
	NUMBA_CACHE_DIR=$(CURDIR)/$(@D) OMP_NUM_THREADS=1 \
		$(BIN)/cswap warm --jobs 2 $(foreach dtype,float32 bfloat16 bool int32 int64,--dtype $(dtype)) \
		expk bitpack csr rle zvc+expk int8 int4 mxfp8 fp8 bf16
	touch $@

test: $(WARMED) ## every test that is neither slow nor for a GPU; CI runs it and check
	$(PYTEST) -m "not slow and not gpu"

INTEGRATED := .cache/integrations
$(INTEGRATED)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEGRATED)
	$(INTEGRATED)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[host,bench,dev,transformers,lightning,accelerate]"
	touch $@

test-integrations: $(INTEGRATED)/.installed ## the tests of cswap.integrations, with the packages of others, in a venv of their own
	$(INTEGRATED)/bin/pytest --timeout 300 -m "not gpu" $(if $(RECORD),--record-versions $(RECORD)) tests/integrations

test-all: export HYPOTHESIS_PROFILE ?= all
test-all: $(WARMED) ## test, and the slow ones; more examples for each property
	$(PYTEST) -m "not gpu"

SLICE ?=
test-gpu: ## the tests that need a CUDA device, with the Python that has torch for it; SLICE=codecs for a part
	PYTHONPATH=.:kernels $(PYTHON) -m pytest -m gpu -v -p no:cacheprovider tests/gpu/test_*$(SLICE)*.py

MINUTES ?=
bench-gpu: ## benchmarks on a CUDA device; MINUTES=9 stops in time, and the next run continues
	PYTHONPATH=.:kernels $(PYTHON) -m bench gpu all $(if $(MINUTES),--minutes $(MINUTES))

check: $(STAMP) ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

fix: $(STAMP) ## format, and repair what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## benchmark of the codecs on the CPU; JSON under bench/results/
	$(BIN)/python -m bench codecs

docs: $(STAMP) ## the documentation as web pages, in site/, tables made anew from committed results
	$(BIN)/python -m bench readme
	$(BIN)/zensical build --strict --clean

build: $(STAMP) ## a wheel in dist/
	rm -rf build # what an earlier build left there would go into this wheel too
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

release: test-all build ## everything that a release needs: the wheel works alone, and the pages' tables are those of the committed results
	.ci/smoke
	$(BIN)/python -m bench readme --check

clean: ## remove what the other targets made, .venv included
	rm -rf .venv build dist site demo-out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .cache
	rm -rf .hypothesis .benchmarks *.egg-info
	find cswap kernels tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
