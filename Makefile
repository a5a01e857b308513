# make demo | make demo-cluster | make example | make test | make test-fast | make test-long | make run | make lint | make docs | make bench | make bench-fleet | make bench-growth | make bench-schedules | make bench-browser | make bench-peers | make bench-cluster | make chaos | make chaos-cluster
# make test-trixie | make test-forky | make install | make uninstall
# (see README.md)
#
# The targets install what they need on a fresh Debian or Ubuntu: Debian packages through apt (as root,
# else through sudo), Python packages into .venv. Nothing is installed twice.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# Without compiled modules each start of a daemon takes twice the time.
unexport PYTHONDONTWRITEBYTECODE

# Prefer the system's interpreter: services with their own user can read it, unlike one in somebody's
# home.
PYTHON ?= $(shell for p in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
VENV := .venv
NODE := .venv-node
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Debian packages: for virtual environments, to build systemd-python, and the browser.
DEBIAN_BASE := python3-venv
DEBIAN_BUILD := gcc pkg-config libsystemd-dev python3-dev
DEBIAN_BROWSER := chromium
DEBIAN_SHELL := chromium-headless-shell
# Its redis-check-rdb is the server under another name.
DEBIAN_REDIS := redis-tools
DEBIAN_NODE := nodejs npm
# For tests that boot a machine: a systemd with user sessions, man to read the manual, curl for HTTP
# requests, sqlite3 for the backups of docs/operations.md.
DEBIAN_SYSTEM := systemd dbus dbus-user-session libpam-systemd man-db curl sqlite3
# To compare how musterd and curl treat answers that break HTTP.
DEBIAN_CURL := curl
# For tests/cluster, demo-cluster and bench-cluster, which start servers of their own. Debian's is not started (see debian-postgres).
DEBIAN_POSTGRES := postgresql
# The other packages that a Debian in a folder needs to install and test musterd.
DEBIAN_TREE := systemd-sysv procps python3 make ca-certificates

.PHONY: help demo demo-cluster example test test-setup test-fast test-long coverage test-trixie test-forky run lint docs format schema bench bench-fleet bench-growth bench-schedules bench-web bench-browser bench-peers bench-cluster chaos chaos-cluster soak-browser screenshots clean install uninstall

help:
	@echo "make demo       set up, then run the main job: sample site, tasks, a killed worker (DEMO=--stay: until Enter)"
	@echo "make demo-cluster  three nodes and a PostgreSQL here: 2,000 tasks, a node killed, one stopped, a restart"
	@echo "make example    a bot that watches six exchanges (EXAMPLE=--demo types for you)"
	@echo "make test       set up, then run the test-suite (test-fast: unit tests and a short simulation)"
	@echo "make test-long  the test-suite with storms, soaks, every combination and all seeds"
	@echo "make test-trixie  as root: on Debian 13, made in a folder: its systemd, its Python (test-forky: Debian 14)"
	@echo "make run        the daemon in the foreground with etc/musterd.toml"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation as a site, in build/site; open index.html (SITE=FOLDER)"
	@echo "make coverage   which lines no test reaches (COVERAGE=tests/unit for a part)"
	@echo "make bench      throughput, latency, recovery and memory, side by side with the standard library"
	@echo "make bench-fleet  ten million tasks, 10,000 restarts, 200 idle workers, shutdown, replacement"
	@echo "make bench-growth  throughput and work per task with more tasks queued, workers, sites, clients"
	@echo "make bench-schedules  5,000 schedules: how late runs start, what they cost; what 100,000 runs leave"
	@echo "make bench-web  memory of the web process, what it costs the supervisor, how fast it answers"
	@echo "make bench-browser  pages per minute, recovery and memory of browsers, beside bare Playwright"
	@echo "make bench-peers  the same tasks beside Celery, Dramatiq, RQ, Huey, arq, Parsl and two pools"
	@echo "make bench-cluster  two nodes and a PostgreSQL, beside Procrastinate and Celery"
	@echo "make install    as root: into $(PREFIX), with a systemd service (docs: README.md); make uninstall"
	@echo "make soak-browser  300 pages with each backend: memory, processes, descriptors, files"
	@echo "make screenshots  of the dashboard, into .screenshots; one of them into docs/images"
	@echo "make chaos      three storms of two minutes and 10,000 kills (docs/chaos.md)"
	@echo "make chaos-cluster  three nodes and a PostgreSQL: 100,000 tasks, 20 and 50 kills (docs/chaos.md)"

demo: $(VENV)/.browser $(VENV)/.web
	@$(BIN)/musterd demo $(DEMO)

demo-cluster: $(VENV)/.cluster | debian-postgres
	@$(BIN)/python -m musterd.supervisor.demo.cluster $(DEMO)

example: $(VENV)/.browser $(VENV)/.sessions $(VENV)/.web
	@$(BIN)/python examples/promo_watch/run.py $(EXAMPLE)

run: $(VENV)/.base
	@$(BIN)/musterd run -c etc/musterd.toml

# Three times as many tests as processors run at a time, because most tests wait for processes. The slowest
# folders come first. tests/system boots machines, which needs root; else it is skipped. No test is run
# twice to make it pass. SHUFFLE=1: in random order, whose seed is printed.
TESTS ?= tests/system tests/browser tests/chaos tests/integration tests/cluster tests/sim tests/typing tests/unit
JOBS ?= $(shell expr 3 '*' $$(nproc))
SPREAD = -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(SHUFFLE),-p randomly)
test-setup: $(VENV)/.test $(BIN)/promtool $(NODE)/.installed $(VENV)/html5lib-tests | debian-curl debian-postgres
	@[ "$$(id -u)" != 0 ] || $(MAKE) --no-print-directory debian-system

test: test-setup
	@$(BIN)/python -m pytest $(TESTS) $(SPREAD)

# Unit tests and a short simulation: no daemon, no browser.
test-fast: $(VENV)/.test
	@$(BIN)/python -m pytest tests/sim tests/unit -n $$(nproc) --dist loadfile --no-loadscope-reorder --seeds 100

# Storms, soaks, hostile clients, every combination of backend and user, and ten times the seeds.
test-long: test-setup
	@$(BIN)/python -m pytest $(TESTS) $(SPREAD) --long

# The service on a real systemd, and the unit tests, on other releases of Debian than this machine's.
# debootstrap makes each release in a folder, from the mirror of this machine's apt (or
# MIRROR=http://...), and the folder is kept. tests/system/bed says what a machine needs.
TREES := .trees
test-trixie test-forky: TESTS = tests/system
test-trixie test-forky: test-%: $(VENV)/.test debian-debootstrap
	@MIRROR="$(MIRROR)" bash tests/system/bed/tree.sh make $* $(CURDIR)/$(TREES)/$* $(CURDIR) \
		$(DEBIAN_TREE) $(DEBIAN_BASE) $(DEBIAN_BUILD) $(DEBIAN_SYSTEM)
	@$(BIN)/python -m pytest $(TESTS) --tree $(CURDIR)/$(TREES)/$*

# Show the lines that no test reaches, also in the daemon, its fork servers and workers, unless they are
# killed.
COVERAGE ?= tests/unit tests/integration
coverage: $(VENV)/.test
	@$(BIN)/coverage erase
	-@$(BIN)/coverage run -m pytest -q $(COVERAGE)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage html -q -d .coverage-html
	@$(BIN)/coverage report
	@echo "line by line: .coverage-html/index.html"

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=tests $(BIN)/mypy -p support
	@$(BIN)/mypy examples/promo_watch

# Any warning is an error: a broken link or anchor, a page that docs/index.md does not name.
SITE ?= build/site
docs: $(VENV)/.docs
	@$(BIN)/sphinx-build -q -E -W --keep-going -c docs/site -d build/doctrees . $(SITE)
	@echo "$(abspath $(SITE))/index.html"

format: $(VENV)/.test
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

# What musterctl prints with --json; a test says when it is not current.
schema: $(VENV)/.test
	@$(BIN)/python -m musterd.supervisor.ctl.json_schema >docs/musterctl.schema.json

# Pictures of the dashboard in its main states, made by the tests; one is part of the documentation.
SHOTS ?= $(CURDIR)/.screenshots
screenshots: $(VENV)/.test
	@mkdir -p $(SHOTS)
	@MUSTERD_SCREENSHOTS=$(SHOTS) $(BIN)/python -m pytest tests/browser/test_dashboard.py
	@cp $(SHOTS)/dashboard-work.png docs/images/dashboard.png
	@ls $(SHOTS)

bench: $(VENV)/.base
	@$(BIN)/python bench/run.py

bench-web: $(VENV)/.test
	@$(BIN)/python bench/web.py

bench-fleet: $(VENV)/.base
	@$(BIN)/python bench/endurance.py

bench-schedules: $(VENV)/.base
	@$(BIN)/python bench/schedules.py $(BENCH)

bench-growth: $(VENV)/.base
	@$(BIN)/python bench/growth.py --svg docs/images/growth.svg $(BENCH)

# Also measures the headless shell, which takes less memory, where Debian has it.
bench-browser: $(VENV)/.browser
	-@$(MAKE) --no-print-directory debian-shell
	@$(BIN)/python bench/browser.py $(BENCH)

# Each peer has its own virtual environment with pinned versions. Redis comes from a Debian package that
# starts no server: the benchmark starts one on a free port. The folder bench/versus has the settings of
# each peer.
PEERS := celery dramatiq rq huey arq parsl
PEER_VENVS := .venv-peers
bench-peers: $(VENV)/.base $(PEERS:%=$(PEER_VENVS)/%/.installed) $(PEER_VENVS)/redis-server
	@$(BIN)/python bench/queues.py $(BENCH)

# Two nodes and a PostgreSQL of its own, side by side with two of the peers. BENCH=--long adds a million
# tasks beside a snapshot that is held open.
CLUSTER_PEERS := procrastinate celery
bench-cluster: $(VENV)/.cluster $(CLUSTER_PEERS:%=$(PEER_VENVS)/%/.installed) $(PEER_VENVS)/redis-server | debian-postgres
	@$(BIN)/python bench/cluster.py $(BENCH)

CHAOS_SECONDS ?= 120
CHAOS_RESTARTS ?= 10000
chaos: $(VENV)/.test
	@$(BIN)/python -m pytest tests/chaos --long \
		--chaos-seconds $(CHAOS_SECONDS) --chaos-restarts $(CHAOS_RESTARTS) $(CHAOS)

CHAOS_TASKS ?= 100000
chaos-cluster: $(VENV)/.test | debian-postgres
	@$(BIN)/python -m pytest tests/cluster/test_chaos_cluster.py -q -s --chaos-tasks $(CHAOS_TASKS) $(CHAOS)

# Install into a virtual environment of the system's interpreter, which every user can read. Build from a
# copy, so that root leaves no files in this directory. Both targets may be stopped anywhere and run
# again: an environment without pip is made anew (also after an upgrade of Python), and an environment
# without musterd has nothing more to uninstall.
PREFIX ?= /opt/musterd
EXTRAS ?= systemd,web
install: debian-base debian-build
	@[ -w "$$(dirname $(PREFIX))" ] || { echo "make install needs root: sudo make install"; exit 1; }
	@echo "installing musterd[$(EXTRAS)] into $(PREFIX)"
	@$(PREFIX)/bin/python -m pip --version >/dev/null 2>&1 || /usr/bin/python3 -m venv $(PREFIX)
	@copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
	tar -cf - pyproject.toml constraints.txt README.md LICENSE supervisor workers ipc testing etc systemd docs src | \
		tar -C "$$copy" --no-same-owner -xf - && \
	pip="$(PREFIX)/bin/python -m pip --quiet --disable-pip-version-check" && \
	$$pip install -c constraints.txt 'setuptools>=68' wheel && \
	$$pip install -c constraints.txt --no-build-isolation "$$copy[$(EXTRAS)]"
	@$(PREFIX)/bin/musterd install

uninstall:
	@[ ! -x $(PREFIX)/bin/musterd ] || $(PREFIX)/bin/musterd uninstall
	@rm -f $(PREFIX)/bin/musterd
	@rm -rf $(PREFIX)

RENDERS ?= 300
soak-browser: $(VENV)/.test
	@$(BIN)/python -m pytest tests/browser/test_browser_soak.py --long --browser-renders $(RENDERS)

clean:
	rm -rf $(VENV) $(NODE) $(PEER_VENVS) $(TREES) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# -- prerequisites ------------------------------------------------------------------------------

# $(call debian,packages): install the packages that are missing.
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

.PHONY: debian-base debian-build debian-browser debian-shell debian-redis debian-system debian-node debian-debootstrap debian-curl debian-postgres
debian-base:
	$(call debian,$(DEBIAN_BASE))
debian-build:
	$(call debian,$(DEBIAN_BUILD))
debian-browser:
	$(call debian,$(DEBIAN_BROWSER))
debian-shell:
	$(call debian,$(DEBIAN_SHELL))
debian-redis:
	$(call debian,$(DEBIAN_REDIS))
debian-system:
	$(call debian,$(DEBIAN_SYSTEM))
debian-node:
	$(call debian,$(DEBIAN_NODE))
debian-curl:
	$(call debian,$(DEBIAN_CURL))
# A server that Debian would make and start when the package is installed is not wanted.
CREATE_CLUSTER := /etc/postgresql-common/createcluster.conf
debian-postgres:
	@! command -v apt-get >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || [ -e $(CREATE_CLUSTER) ] || { \
	root=; [ "$$(id -u)" = 0 ] || root=sudo; $$root mkdir -p $(dir $(CREATE_CLUSTER)) && \
	echo "create_main_cluster = false" | $$root tee $(CREATE_CLUSTER) >/dev/null; }
	$(call debian,$(DEBIAN_POSTGRES))
debian-debootstrap:
	$(call debian,debootstrap)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing musterd into $(VENV)"
	@$(PIP) install -c constraints.txt 'setuptools>=68' wheel
	@$(PIP) install -c constraints.txt --no-build-isolation -e .
	@touch $@

# promtool checks etc/prometheus-rules.yml. Only this program is taken out of the Debian package, which
# would start a server when installed. Without promtool, its tests are skipped.
$(BIN)/promtool: | $(VENV)/bin/python
	@if command -v promtool >/dev/null; then ln -sf "$$(command -v promtool)" $@; exit 0; fi; \
	command -v apt-get >/dev/null || { echo "without promtool, some tests are skipped"; exit 0; }; \
	echo "fetching promtool"; into=$$(mktemp -d) && trap 'rm -rf "$$into"' EXIT && cd "$$into" && \
	{ apt-get download -qq prometheus 2>/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq prometheus 2>/dev/null; }; } && \
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xf - ./usr/bin/promtool && \
	mv usr/bin/promtool $(abspath $(BIN))/promtool || echo "without promtool, some tests are skipped"

# zeromq.js, a foreign client in the tests, with pinned versions.
$(NODE)/.installed: tests/integration/node/package.json
	@command -v npm >/dev/null || $(MAKE) --no-print-directory debian-node
	@echo "installing zeromq.js into $(NODE)"
	@mkdir -p $(NODE) && cp $< $(NODE)/package.json
	@cd $(NODE) && npm install --silent --no-audit --no-fund --no-package-lock
	@touch $@

# html5lib's tests of encodings, from its source package, which needs an older setuptools. Without them,
# some of our tests are skipped.
HTML5LIB := 1.1
$(VENV)/html5lib-tests: | $(VENV)/bin/python
	@echo "fetching html5lib's tests"; into=$$(mktemp -d) && trap 'rm -rf "$$into"' EXIT && \
	echo 'setuptools<80' >"$$into/constraints" && \
	PIP_CONSTRAINT="$$into/constraints" $(PIP) download --use-pep517 --no-deps --no-binary html5lib -d "$$into" \
		html5lib==$(HTML5LIB) && mkdir "$$into/tests" && \
	tar -xzf "$$into/html5lib-$(HTML5LIB).tar.gz" -C "$$into/tests" --strip-components=4 \
		html5lib-$(HTML5LIB)/html5lib/tests/testdata/encoding && \
	mv "$$into/tests" $@ || echo "without html5lib's tests, some tests are skipped"

$(PEER_VENVS)/%/.installed: bench/versus/pins/%.txt | $(VENV)/bin/python
	@echo "installing $* into $(@D)"
	@[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --quiet --disable-pip-version-check install -r $<
	@touch $@

$(PEER_VENVS)/redis-server:
	@mkdir -p $(@D)
	@command -v redis-server >/dev/null || $(MAKE) --no-print-directory debian-redis
	@ln -sf "$$(command -v redis-server || command -v redis-check-rdb)" $@

$(VENV)/.browser: $(VENV)/.base | debian-browser
	@echo "installing the browser extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[browser]'
	@touch $@

$(VENV)/.web: $(VENV)/.base
	@echo "installing the web extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[web]'
	@touch $@

$(VENV)/.cluster: $(VENV)/.base
	@echo "installing the cluster extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[cluster]'
	@touch $@

$(VENV)/.sessions: $(VENV)/.base
	@echo "installing the sessions extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[sessions]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@echo "installing the docs extra"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/.test: $(VENV)/.browser | debian-build
	@echo "installing what the tests need"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[alerts,browser,cluster,sessions,systemd,yaml,web,dev,docs,recipes,test]'
	@touch $@
