# Two commands are all there is to know: `make demo` and `make test`. Both need Python 3.11 or newer and nothing else.
# Both write only into this folder. Paths are relative and programs run as modules, so that the folder may have a space
# in its name.

PYTHON ?= python3.11
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -c constraints.txt
# pip keeps no copies outside this folder. `make PIP_NO_CACHE_DIR=0 ...` lets it use its cache.
export PIP_NO_CACHE_DIR ?= 1
# mkdocs-material advertises its successor on every build.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test lint format docs docs-serve notebooks pictures hooks bench bench-smoke fuzz soak clean

demo: .venv/demo.stamp
	@$(PY) examples/demo.py build/demo

# Two test processes, each with whole files of tests, so that fixtures that start a browser or a child are made once.
# The tests build the documentation and run its code. Temporary files are removed. Other users may look into their folder,
# because tests run by root act as another user where a file must not be writable.
test: lint
	@mkdir -p build/cache; TMPDIR=$$(mktemp -d); chmod 755 "$$TMPDIR"; XDG_CACHE_HOME="$(CURDIR)/build/cache"; export TMPDIR XDG_CACHE_HOME; \
		trap 'rm -rf "$$TMPDIR"' EXIT; trap 'exit 130' INT TERM; \
		$(PY) -m pytest --numprocesses 2 --dist loadfile

lint: .venv/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/dev.stamp
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: .venv/dev.stamp
	$(PY) -m mkdocs build --strict --quiet
	@echo 'The site is in build/site: open build/site/index.html'

docs-serve: .venv/dev.stamp
	$(PY) -m mkdocs serve

# Executes the notebooks and stores them with their outputs. (`make test` executes them too, and stores nothing.)
notebooks: .venv/dev.stamp
	$(PY) notebooks/run.py

# Makes the screens, the picture and the comparison of README.md and docs/ again.
pictures: .venv/dev.stamp
	$(PY) docs/make_pictures.py

# Runs ruff and mypy before every commit.
hooks: .venv/dev.stamp
	$(PY) -m pre_commit install

# Smaller than the claims are stated, half an hour in all; `benchmarks/run.py --whole` takes hours.
bench: .venv/bench.stamp
	$(PY) benchmarks/run.py

# Every benchmark as small as possible, to see that it works.
bench-smoke: .venv/dev.stamp
	$(PY) benchmarks/run.py --smoke

# Changes good input at random for an hour, and keeps what fails for the tests.
fuzz: .venv/dev.stamp
	$(PY) benchmarks/bad_input_is_refused.py --seconds 270

# Disturbs trainings for an hour. As root, their disk fills up as well.
soak: .venv/bench.stamp
	$(PY) benchmarks/training_survives_an_hour.py

clean:
	rm -rf .venv build dist oomguard.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/demo.stamp: $(PY) pyproject.toml constraints.txt
	@echo 'Installing oomguard into .venv (the first time it fetches PyTorch, which takes a while)'
	@$(PIP) -e .
	@touch .venv/demo.stamp

.venv/dev.stamp: $(PY) pyproject.toml constraints.txt
	@echo 'Installing oomguard and what its tests need into .venv (the first time it fetches PyTorch, which takes a while)'
	@$(PIP) -e '.[dev]'
	@touch .venv/demo.stamp .venv/dev.stamp

.venv/bench.stamp: .venv/dev.stamp
	@$(PIP) -e '.[dev,bench]'
	@touch .venv/bench.stamp

$(PY):
	@for python in "$(PYTHON)" python3; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "Making .venv with $$("$$python" --version)"; \
			"$$python" -m venv --clear .venv && exit; \
			rm -rf .venv; exit 1; \
		fi; \
	done; \
	echo "oomguard needs Python 3.11 or newer, but neither $(PYTHON) nor python3 ($$(python3 --version 2>&1)) is one." >&2; \
	echo "Install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1
