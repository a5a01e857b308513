# make demo | make test | make run | make lint | make bench | make bench-fleet | make chaos
# (see README.md)
#
# Everything is made from scratch on a fresh Debian or Ubuntu: Debian packages through apt (as root,
# else through sudo), Python packages into .venv. Nothing is installed twice.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# The system's interpreter where there is one: services that run as their own user can read it,
# which they cannot in somebody's home.
PYTHON ?= $(shell for p in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Debian packages: to make virtual environments, to build systemd-python, and the browser.
DEBIAN_BASE := python3-venv
DEBIAN_BUILD := gcc pkg-config libsystemd-dev python3-dev
DEBIAN_BROWSER := chromium

.PHONY: help demo test test-fast run lint format bench bench-fleet chaos clean

help:
	@echo "make demo       set up, then run the main job: sample site, tasks, a killed worker"
	@echo "make test       set up, then run the whole test-suite (test-fast: seconds, no processes)"
	@echo "make run        the daemon in the foreground with etc/musterd.toml"
	@echo "make lint       ruff and mypy"
	@echo "make bench      throughput, latency, recovery and memory, side by side with the standard library"
	@echo "make bench-fleet  10,000 restarts, 200 idle workers, shutdown, replacement"
	@echo "make chaos      three storms of two minutes and 10,000 kills (docs/chaos.md)"

demo: $(VENV)/.browser
	@$(BIN)/musterd demo

run: $(VENV)/.base
	@$(BIN)/musterd run -c etc/musterd.toml

# Two at a time, file by file: most tests wait for processes.
test: $(VENV)/.dev
	@$(BIN)/python -m pytest tests -n 2 --dist loadfile

test-fast: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/unit tests/sim

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(VENV)/.base
	@$(BIN)/python bench/run.py

bench-fleet: $(VENV)/.base
	@$(BIN)/python bench/endurance.py

CHAOS_SECONDS ?= 120
CHAOS_RESTARTS ?= 10000
chaos: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/chaos \
		--chaos-seconds $(CHAOS_SECONDS) --chaos-restarts $(CHAOS_RESTARTS) $(CHAOS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- what has to be there first -----------------------------------------------------------------

# $(call debian,packages): install those that are missing.
define debian
	@missing=$$(for p in $(1); do dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
		command -v apt-get >/dev/null || { echo "musterd needs the equivalent of these Debian packages:" $$missing; exit 1; }; \
		sudo=; [ "$$(id -u)" = 0 ] || { sudo=sudo; echo "sudo is needed to install Debian packages:" $$missing; }; \
		$$sudo apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
endef

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "musterd needs Python 3.11 or later (Debian: apt-get install python3)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory debian-base
	@echo "creating $(VENV) from $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

.PHONY: debian-base debian-build debian-browser
debian-base:
	$(call debian,$(DEBIAN_BASE))
debian-build:
	$(call debian,$(DEBIAN_BUILD))
debian-browser:
	$(call debian,$(DEBIAN_BROWSER))

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing musterd into $(VENV)"
	@$(PIP) install -c constraints.txt 'setuptools>=68' wheel
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

$(VENV)/.browser: $(VENV)/.base | debian-browser
	@echo "installing the browser extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[browser]'
	@touch $@

$(VENV)/.dev: $(VENV)/.browser | debian-build
	@echo "installing what the tests need"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[browser,systemd,yaml,dev]'
	@touch $@
