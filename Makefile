# make train and make test set up everything they need in .venv. PYTHON=python3.12 selects the interpreter, NUMPY=2.1 the
# NumPy version; a .venv with another version is created again.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed$(NUMPY:%=-numpy-%)

.PHONY: train demo test test-processors test-slow test-faults test-network torture test-cuda test-packages test-all parity parity-quick bench bench-peers horovod docs docs-quick notebooks lint install clean help
.DELETE_ON_ERROR:

ifdef PYTHON
version = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifneq ($(call version,"$$(PYTHON=$(PYTHON) scripts/find-python.sh 2>/dev/null)"),$(call version,$(BIN)/python))
.PHONY: $(READY)
endif
endif

train: install  ## the main job: LeNet on Fashion-MNIST, from scratch, on 2 devices
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --batch-size 256 --lr 0.2 --epochs 4

demo: install  ## ten seconds: LeNet learns to tell ten synthetic pictures apart, on 2 devices
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 6000 --batch-size 32 --lr 0.2 --epochs 3

test: install  ## the test suite
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow"

# Numerical tests. The variable makes MXNet compute as on another processor.
NUMERICAL := tests/test_lessons.py tests/test_partition.py tests/training/test_extras.py tests/training/test_tuning.py
PROCESSORS := SSE41 AVX2 AVX512_CORE
test-processors: install  ## numerical tests, resume and parity's exact part as on other processors: PROCESSORS="SSE41 AVX2"
	for isa in $(PROCESSORS); do echo "DNNL_MAX_CPU_ISA=$$isa"; \
	    DNNL_MAX_CPU_ISA=$$isa $(BIN)/python -m pytest $(NUMERICAL) \
	        tests/test_walkthrough.py tests/training/test_evaluate.py tests/training/test_resume.py \
	        tests/parity -m "not slow" || exit 1; done

test-processors-quick: install
	DNNL_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest -n 2 $(NUMERICAL)

test-slow: install  ## the test suite, including tests that take minutes
	$(BIN)/python -m pytest

test-faults: install  ## kill the processes of a run, one by one, and show what the others do
	$(BIN)/python -m pytest -m faults -s

test-network: install  ## workers in separate network namespaces: needs root, ip and tc
	@cd tests/distributed && ../../$(BIN)/python -c "import machines, sys; sys.exit(machines.missing())"
	$(BIN)/python -m pytest -m network -rs

MINUTES := 30
SEED := 1
torture: install  ## random runs with random faults, and the fuzzing of all readers: MINUTES=30 SEED=1
	$(BIN)/python tests/torture/torture.py --minutes $(MINUTES) --seed $(SEED)

test-cuda: install  ## mxnet-cu112 and NVIDIA's wheels, in a separate environment: downloads 2.1 GB
	$(BIN)/python -m pytest -m cuda_wheels

test-packages: install  ## a job for each of several packages that need MXNet 1.x: downloads 500 MB
	$(BIN)/python tests/legacy/packages.py

test-all:  ## the test suite with each installed Python: PYTHONS="3.9 3.12:2.1" selects Python and NumPy, TESTS=... the tests
	@scripts/test-all.sh

parity: install  ## compare with everything that the notebooks printed
	$(BIN)/python scripts/parity.py

parity-quick: install  ## the same in 3 minutes: one training run for each of two recipes
	$(BIN)/python scripts/parity.py --quick

bench: install  ## speed and memory, compared with the notebook's own code
	$(BIN)/python scripts/bench.py steps

# PyTorch's build for CPUs takes 190 MB, and the default build several GB. pip finds the former only if it knows its index.
bench-peers: install  ## the same, compared with PyTorch, which this installs
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev,bench]'
	$(BIN)/python scripts/bench.py peers

horovod: install  ## build and install Horovod, for training on several machines
	@$(BIN)/python scripts/build_horovod.py

docs: install  ## the website, in build/docs; runs every code cell
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	rm -rf build/docs docs/api
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python -m pytest -m notebooks tests/test_notebooks.py

docs-quick: export GLUON_MGPU_DOCS_QUICK = 1
docs-quick: docs  ## the same, trained on few examples and without the long cells

notebooks: docs  ## the lessons as executed notebooks, in build/docs/notebooks

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(READY)  ## only set up .venv

$(READY): setup.cfg pyproject.toml scripts/find-python.sh
	@python=$$(scripts/find-python.sh) && echo "setting up $(VENV) with $$($$python --version) ($$python)" && $$python -m venv --clear $(VENV)
	@# mxnet comes with --no-deps because of its pin of NumPy: docs/install.md.
	@pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check"; \
	    $$pip --editable $(if $(NUMPY),'.[dev]' 'numpy==$(NUMPY).*','.[cpu,dev]') && $$pip --no-deps mxnet==1.9.1 || \
	    { echo "setting up $(VENV) failed (see above): it needs network access (or PIP_INDEX_URL), 660 MB, and a writable checkout" >&2; exit 1; }
	@touch $@

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) .venvs build dist docs/api *.egg-info

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)
