# make train, make test: each sets up what it needs in .venv. PYTHON=python3.12 chooses the interpreter, NUMPY=2.1 the
# NumPy; where .venv has others, it is made anew.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed$(NUMPY:%=-numpy-%)

.PHONY: train test test-slow test-faults test-network test-cuda test-all parity parity-quick bench bench-peers horovod docs docs-quick lint install clean help
.DELETE_ON_ERROR:

ifdef PYTHON
version = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifneq ($(call version,"$$(PYTHON=$(PYTHON) scripts/find-python.sh 2>/dev/null)"),$(call version,$(BIN)/python))
.PHONY: $(READY)
endif
endif

train: install  ## the main job: LeNet on Fashion-MNIST, from scratch, on 2 devices
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --batch-size 256 --lr 0.2 --epochs 4

test: install  ## the suite
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow"

test-slow: install  ## the suite and the proofs that take minutes
	$(BIN)/python -m pytest

test-faults: install  ## processes of a run are killed, one by one: a table of what the others do
	$(BIN)/python -m pytest -m faults -s

test-network: install  ## workers on machines of their own, network namespaces: needs root, ip and tc
	@cd tests && ../$(BIN)/python -c "import machines, sys; sys.exit(machines.missing())"
	$(BIN)/python -m pytest -m network -rs

test-cuda: install  ## mxnet-cu112 and NVIDIA's wheels, in an environment of their own: downloads 2.1 GB
	$(BIN)/python -m pytest -m cuda_wheels

test-all:  ## the suite with each Python there is: PYTHONS="3.9 3.12:2.1" chooses (and NumPy), TESTS=tests/test_step.py too
	@scripts/test-all.sh

parity: install  ## everything held against what the notebooks printed
	$(BIN)/python scripts/parity.py

parity-quick: install  ## the same in 3 minutes: one training of two recipes
	$(BIN)/python scripts/parity.py --quick

bench: install  ## speed and memory beside the notebook's own code
	$(BIN)/python scripts/bench.py steps

bench-peers: install  ## the same beside PyTorch, which this installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev,bench]'
	$(BIN)/python scripts/bench.py peers

horovod: install  ## build Horovod for training on several machines, install it and check it
	@$(BIN)/python scripts/build_horovod.py

docs: install  ## the site, in build/docs; every code cell is run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	rm -rf build/docs docs/api
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

docs-quick: export GLUON_MGPU_DOCS_QUICK = 1
docs-quick: docs  ## the same, with the long cells shown and not run

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)  ## .venv alone

$(READY): setup.cfg pyproject.toml scripts/find-python.sh
	@python=$$(scripts/find-python.sh) && echo "setting up $(VENV) with $$($$python --version) ($$python)" && $$python -m venv --clear $(VENV)
	@# The second one: docs/install.md, MXNet's pin of NumPy.
	@pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check"; \
	    $$pip --editable $(if $(NUMPY),'.[dev]' 'numpy==$(NUMPY).*','.[cpu,dev]') && $$pip --no-deps mxnet==1.9.1 || \
	    { echo "$(VENV) is not set up, for what pip says above: it needs a network or a mirror that PIP_INDEX_URL names, 570 MB there, and a checkout that can be written" >&2; exit 1; }
	@touch $@

clean:  ## remove .venv and what was built
	rm -rf $(VENV) .venvs build dist docs/api *.egg-info

help:  ## what make can make
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)
