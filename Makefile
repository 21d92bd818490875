PYTHON ?= python3
CONFIG ?= serve_config.yaml
PY := .venv/bin/python

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1|\2/p' Makefile | column -ts'|'

setup:  ## make .venv from the lock (PYTHON=python3.12 for another interpreter)
	@$(PYTHON) scripts/setup.py

model: setup
	@$(PY) -m app.model

serve: model  ## start the fleet on this machine (CONFIG=serve_config.yaml), ctrl-C ends it
	@exec $(PY) -m scripts.serve $(CONFIG)

check: setup  ## ruff and mypy
	$(PY) -m ruff check . && $(PY) -m mypy

debian:  ## Debian packages that tests drive (a browser, Prometheus); needs root
	@$(PYTHON) scripts/debian.py

test: model check debian  ## checks and all tests but the slow ones (some 15 minutes on two cores)
	$(PY) -m pytest -m "not slow and not soak and not tools"

test-slow: model debian  ## moves, kills, drains, dashboards and validations on real fleets
	$(PY) -m pytest -m "slow and not soak and not tools"

test-soak: model  ## more of the slow ones: other lengths, moments and chances
	$(PY) -m pytest -m soak

test-tools: model  ## our load client beside guidellm and inference-perf, which it installs (1 GB)
	$(PY) -m pytest -m tools

bench: model  ## BENCH=name runs a measurement, without it lists them
	$(PY) -m loadgen bench $(BENCH)

clean:  ## remove .venv and caches; the converted model stays in the user's cache
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup model serve check debian test test-slow test-soak test-tools bench clean
