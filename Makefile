# The stable commands of this repository. Each is safe to run again; a second run does only what changed.
# Variables: AENV_HOME (state of the server), AENV_CACHE (downloads and build caches, never required).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

.PHONY: help setup demo test test-lab lint bench clean

help: ## what can be done here
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: ## install what is missing, build the Rust programs, make guest assets and the base template
	@scripts/setup.sh

demo: setup ## start a server, run examples/quickstart.py against it, stop
	@scripts/demo.sh

test: setup ## all tests
	@scripts/test.sh

test-lab: setup ## only the tests inside an emulated host: ublk, kernel NBD, KVM (part of `make test`)
	@scripts/lab.sh

lint: setup ## ruff, mypy --strict, rustfmt, clippy
	@scripts/lint.sh

bench: setup ## benchmarks; writes bench/RESULTS.md
	@scripts/bench.sh

clean: ## remove what the build made in this folder (not AENV_HOME, not caches)
	rm -rf .venv build target src/agentenv/_native*.so .mypy_cache .ruff_cache .pytest_cache tests/conformance/js/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
