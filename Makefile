# Every target sets up what it needs first: a virtual environment in .venv with the locked dependencies.
# Variables given on the command line (make run DATA=/tmp/data) reach the program as its environment.

PYTHON ?= python3
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60

export PYTHON
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, and each would compile every module again
SETUP := @sh tools/setup.sh
PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup run test check crash bench wheel clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv with everything that the other targets need
	$(SETUP) dev

run: ## the pipeline: a fleet through a queue and Spark (RATE, SECONDS, DATA, CHAOS=1)
	$(SETUP) dev
	@$(PY) -m examples.pipeline

# One worker more than cores: tests of waits wait.
test: ## run the tests, without the long campaigns (PYTEST_ARGS="-k log" picks some)
	$(SETUP) dev
	@JAVA_TOOL_OPTIONS="$$($(PY) tools/spark_archive.py)" \
		$(PY) -m pytest -n $$($(PY) -c "import os; print(min(os.cpu_count() + 1, 4))") --dist loadfile -m "not campaign" $(PYTEST_ARGS)

check: ## ruff, strict mypy and the tidy test
	$(SETUP) dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -m pytest tests/test_tidy.py

crash: ## the long crash campaigns, then each fuzz target for FUZZ_SECONDS (60)
	$(SETUP) dev,fuzz
	@$(PY) -m pytest -m campaign --timeout=3600 $(PYTEST_ARGS)
	@set -e; for target in $$($(PY) tests/fuzz/fuzz.py --list); do \
		echo "$$target, $(FUZZ_SECONDS) s"; \
		$(PY) tests/fuzz/fuzz.py "$$target" -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=tests/fuzz/; \
	done

bench: ## the benchmarks, with our peers in the same run
	$(SETUP) dev,bench
	@$(PY) -m bench

wheel: ## build the package: dist/penstock-*.whl, for pip install
	$(SETUP) dev
	@$(PY) -m hatchling build --target wheel

clean: ## remove .venv and every cache; data and benchmark results stay
	@rm -rf .venv .mypy_cache .ruff_cache .hypothesis dist
	@find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
