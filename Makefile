# Everything runs in .venv, which is made on first use and remade when the pins change.

PYTHON ?= python3
BIN := .venv/bin

# Workers of the tests, each of which starts ranks of its own: one more than two cores, since some tests only wait.
JOBS ?= 3

# Ranks share the cores: with more than one thread each they fight over them, and sums change with the count.
export OMP_NUM_THREADS := 1
# The tests start many interpreters, and each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install train test more soak attack kills faults laws peers-tests integrations check docs dist doctor bench bench-engine bench-accumulate format clean

help:
	@echo 'make train     train a small GPT on two ranks of this machine (about 3 minutes, ARGS="--steps 50")'
	@echo 'make test      run the tests           (make test ARGS="-k window -x")'
	@echo 'make more      run the tests that make test leaves out: whole programs, and more combinations (minutes)'
	@echo 'make soak      random trainings, compared with one process, for as long as asked (ARGS="--minutes 30")'
	@echo 'make attack    random trainings with threads that read, signals, interrupts and faults (ARGS="--minutes 30")'
	@echo 'make kills     trainings that are killed at random moments and go on elsewhere (minutes, ARGS="--seeds 20")'
	@echo 'make faults    ranks that are killed, stopped, cut off or raise at random moments (an hour, ARGS="--seeds 2")'
	@echo 'make laws      what must hold of any input, tried with many more inputs than make test does (minutes)'
	@echo 'make peers-tests   the tests of torch and of Accelerate, with our classes in the place of theirs (minutes)'
	@echo 'make integrations  the tests with Lightning, Fabric, transformers and Ray (minutes)'
	@echo 'make check     lint, formatting, types'
	@echo 'make docs      build the site of the documentation in build/site: open build/site/index.html'
	@echo 'make doctor    say whether this machine is fit, and how fast its network is'
	@echo 'make install   create .venv with the pinned packages and gradsync itself'
	@echo 'make bench     measure what synchronization costs, against all peers (about 40 minutes, as root)'
	@echo 'make bench-engine       time a step against DDP, tuned and stock (about 4 minutes)'
	@echo 'make bench-accumulate   time what accumulate() adds to a micro-batch (seconds)'
	@echo 'make dist      build wheel and source archive in dist/, and check both'
	@echo 'make format    sort imports and format'
	@echo 'make clean     remove caches, builds and .venv'

install: .venv/.installed

train: .venv/.installed
	$(BIN)/gradsync train --nproc 2 $(ARGS)

doctor: .venv/.installed
	$(BIN)/gradsync doctor $(ARGS)

test: .venv/.dev .venv/.apt
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not program and not breadth" $(ARGS)

# Launchers, browsers and compilers take seconds each, whatever they find. CI runs both.
more: .venv/.dev .venv/.apt
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "program or breadth" $(ARGS)

soak: .venv/.dev
	$(BIN)/python -m tests.soak $(ARGS)

attack: .venv/.dev
	$(BIN)/python -m tests.attack $(ARGS)

kills: .venv/.dev
	$(BIN)/python -m tests.kills $(ARGS)

faults: .venv/.dev
	$(BIN)/python -m tests.faults $(ARGS)

laws: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m hypothesis --hypothesis-profile deep --timeout 3600 $(ARGS)

peers-tests: .venv/.dev
	$(BIN)/python -m tests.torch_ddp_suite $(ARGS)
	$(BIN)/python -m tests.accelerate_suite $(ARGS)

# What a change of a pin in requirements/integrations.txt must pass.
integrations: .venv/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup tests/tools/integrations tests/tools/test_metrics.py tests/test_real_packages.py $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# Strict: a link that leads nowhere, or a name that the reference does not have, fails. The variable silences a notice of
# the theme about another program.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo 'build/site/index.html'

# Without isolation: what builds is pinned, too.
dist: .venv/.dev
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py dist

bench: .venv/.bench .venv/.apt
	$(BIN)/gradsync bench all --quick $(ARGS)

bench-engine: .venv/.installed
	$(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/engine.py $(ARGS)

bench-accumulate: .venv/.installed
	$(BIN)/python benchmarks/accumulate_overhead.py $(ARGS)

format: .venv/.dev
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, each the last act of its rule, so an interrupted install starts again. The environment is cleared when the
# pins of the library change; a change of pyproject.toml only repeats the quick editable install.
.venv/.pinned: requirements/run.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --requirement requirements/run.txt
	@touch $@

# --no-deps and --no-build-isolation: only what is pinned is ever installed.
.venv/.installed: .venv/.pinned pyproject.toml
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv/.bench: .venv/.installed requirements/bench.txt
	$(BIN)/pip install --quiet --requirement requirements/bench.txt
	@touch $@

.venv/.docs: .venv/.installed requirements/docs.txt
	$(BIN)/pip install --quiet --requirement requirements/docs.txt
	@touch $@

.venv/.dev: .venv/.bench .venv/.docs requirements/dev.txt requirements/integrations.txt
	$(BIN)/pip install --quiet --requirement requirements/dev.txt
	@touch $@

# Programs that single tests need; without them those tests say so and are skipped.
.venv/.apt: requirements/apt.txt | .venv/.installed
	@missing=$$(sed 's/ *#.*//; /^$$/d' $< | while read -r package program; do \
		command -v $$program >/dev/null || echo $$package; done); \
	if [ -n "$$missing" ] && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null || true; \
	fi
	@touch $@
