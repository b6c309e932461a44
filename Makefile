# Every target sets up what it needs first: a virtual environment in .venv with the locked dependencies.
# Variables given on the command line (make run DATA=/tmp/data) reach the program as its environment.

PYTHON ?= python3
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 10
MINUTES ?= 10

export PYTHON
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, and each would compile every module again
SETUP := @sh tools/setup.sh
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup run test check crash exhaustive bench soak docs wheel dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with everything that the other targets need
	$(SETUP) dev

run: ## the pipeline: a fleet through a queue and Spark (RATE, SECONDS, DATA, CHAOS=1)
	$(SETUP) dev
	@$(PY) -m examples.pipeline

# Two workers more than cores: tests of waits wait.
test: ## run the tests, without the long campaigns (PYTEST_ARGS="-k log" picks some)
	$(SETUP) dev
	@JAVA_TOOL_OPTIONS="$$($(PY) tools/spark_archive.py)" \
		$(PY) -m pytest -n $$($(PY) -c "import os; print(min(os.cpu_count() + 2, 4))") --dist loadfile -m "not campaign" $(PYTEST_ARGS)

check: ## ruff, strict mypy and the tidy test
	$(SETUP) dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m pytest tests/test_tidy.py

crash: ## the fault campaign with fresh seeds for MINUTES (10), then each fuzz target for FUZZ_SECONDS (10)
	$(SETUP) dev,fuzz
	@$(PY) -m tests.campaign --minutes $(MINUTES)
	@set -e; for target in $$($(PY) tests/fuzz/fuzz.py --list); do \
		echo "$$target, $(FUZZ_SECONDS) s"; \
		$(PY) tests/fuzz/fuzz.py "$$target" -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=tests/fuzz/; \
	done

exhaustive: ## every campaign of the tests from end to end: some hours
	$(SETUP) dev
	@$(PY) -m pytest -m campaign --timeout=7200 $(PYTEST_ARGS)

bench: ## the benchmarks, with our peers in the same run
	$(SETUP) dev,bench
	@$(PY) -m bench

soak: ## mixed load on all kinds for MINUTES (60): memory, files, threads, disk and latency must stay level
	$(SETUP) dev,bench
	@MINUTES=$(if $(filter command line environment,$(origin MINUTES)),$(MINUTES),60) $(PY) -m bench.soak

docs: ## build the site with search and the API's reference: site/index.html
	$(SETUP) dev,docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "site/index.html"

# The tutorial's first command: it installs what builds the wheel, not what the tests need (gigabytes, and Java).
wheel: ## build the package: dist/penstock-*.whl, for pip install
	$(SETUP) $(if $(wildcard .venv/done/dev),dev,wheel)
	@$(PY) -m hatchling build --target wheel

dist: ## build the wheel and the sdist: dist/
	$(SETUP) dev,release
	@$(PY) -m build --outdir dist .

clean: ## remove .venv and every cache; data and benchmark results stay
	@rm -rf .venv .mypy_cache .ruff_cache .hypothesis dist site
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
