# make train and make test set up everything they need in .venv. PYTHON=python3.12 selects the interpreter, NUMPY=2.1 the
# NumPy version. A .venv with a different version of either is replaced.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed$(NUMPY:%=-numpy-%)

.PHONY: train demo test test-processors test-slow test-faults test-network torture test-cuda test-packages test-all old-books parity parity-quick bench bench-peers horovod docs docs-quick notebooks lint audit install clean help
.DELETE_ON_ERROR:

ifdef PYTHON
version = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifneq ($(call version,"$$(PYTHON=$(PYTHON) scripts/find-python.sh 2>/dev/null)"),$(call version,$(BIN)/python))
.PHONY: $(READY)
endif
endif

train: install  ## train LeNet from scratch on Fashion-MNIST, on 2 devices: the main job
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --batch-size 256 --lr 0.2 --epochs 4

demo: install  ## train LeNet on ten classes of synthetic pictures, on 2 devices (ten seconds)
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 6000 --batch-size 32 --lr 0.2 --epochs 3

test: install  ## run the test suite
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow"

# Numerical tests. DNNL_MAX_CPU_ISA limits the instruction sets that MXNet uses, as on an older processor.
NUMERICAL := tests/test_lessons.py tests/test_partition.py tests/training/test_extras.py tests/training/test_tuning.py
PROCESSORS := SSE41 AVX2 AVX512_CORE
test-processors: install  ## run the numerical, resume and parity tests with other instruction sets: PROCESSORS="SSE41 AVX2"
	for isa in $(PROCESSORS); do echo "DNNL_MAX_CPU_ISA=$$isa"; \
	    DNNL_MAX_CPU_ISA=$$isa $(BIN)/python -m pytest $(NUMERICAL) \
	        tests/test_walkthrough.py tests/test_evaluate.py tests/training/test_resume.py \
	        tests/parity -m "not slow" || exit 1; done

test-processors-quick: install
	DNNL_MAX_CPU_ISA=SSE41 $(BIN)/python -m pytest -n 2 $(NUMERICAL)

test-slow: install  ## run the test suite, including tests that take minutes
	$(BIN)/python -m pytest

test-faults: install  ## kill one process of a run at a time, and show how the others exit
	$(BIN)/python -m pytest -m faults -s

test-network: install  ## test workers in separate network namespaces (needs root, ip and tc)
	@cd tests/distributed && ../../$(BIN)/python -c "import machines, sys; sys.exit(machines.missing())"
	$(BIN)/python -m pytest -m network -rs

MINUTES := 30
SEED := 1
torture: install  ## test random runs with random faults, and fuzz every file reader: MINUTES=30 SEED=1
	$(BIN)/python tests/torture/torture.py --minutes $(MINUTES) --seed $(SEED)

test-cuda: install  ## test mxnet-cu112 with NVIDIA's wheels in a separate environment (2.1 GB to download)
	$(BIN)/python -m pytest -m cuda_wheels

test-packages: install  ## run one program for each of several packages that need MXNet 1.x (500 MB to download)
	$(BIN)/python tests/legacy/packages.py

test-all:  ## run the test suite with each installed Python: PYTHONS="3.9 3.12:2.1" selects versions of Python and NumPy, TESTS=... selects tests
	@scripts/test-all.sh

parity: install  ## compare this project's results with everything that the notebooks printed
	$(BIN)/python scripts/parity.py

parity-quick: install  ## a 3-minute version of parity: one training run for each of two recipes
	$(BIN)/python scripts/parity.py --quick

bench: install  ## compare speed and memory with the notebook's own code
	$(BIN)/python scripts/bench.py steps

# PyTorch's CPU build takes 190 MB; the default build takes several GB. pip finds the CPU build only in PyTorch's index.
bench-peers: install  ## install PyTorch, and compare speed and memory with it (results in build/bench)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev,bench]'
	$(BIN)/python scripts/bench.py peers --out build/bench

# d2l asks for NumPy 1.21 and pandas 1.2, so the three packages are installed without what they ask for.
D2L := 0.17.6
old-books: install  ## install gluonbook, d2lzh and d2l, which programs for "Dive into Deep Learning" import: D2L=0.11.4
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[old-books]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gluonbook==0.8.10 d2lzh==1.0.0 d2l==$(D2L)

horovod: install  ## build and install Horovod, for training on several machines
	@$(BIN)/python scripts/build_horovod.py

docs: install  ## build the website in build/docs, and run every code cell
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	rm -rf build/docs docs/api
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python -m pytest -m notebooks tests/test_notebooks.py

docs-quick: export GLUON_MGPU_DOCS_QUICK = 1
docs-quick: docs  ## build the website quickly, with few training examples and without the slow cells

notebooks: docs  ## build the website, and the lessons as executed notebooks in build/docs/notebooks

lint: install  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: install  ## run bandit, and check all installed packages for known vulnerabilities (needs the network)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[audit]'
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive gluon_mgpu scripts
	$(BIN)/pip-audit --local --skip-editable

install: $(READY)  ## set up .venv and do nothing else

$(READY): setup.cfg pyproject.toml scripts/find-python.sh
	@python=$$(scripts/find-python.sh) && echo "setting up $(VENV) with $$($$python --version) ($$python)" && $$python -m venv --clear $(VENV)
	@# mxnet is installed with --no-deps because it pins an old NumPy: docs/install.md.
	@pip="$(BIN)/python -m pip install --quiet --disable-pip-version-check"; \
	    $$pip --editable $(if $(NUMPY),'.[dev]' 'numpy==$(NUMPY).*','.[cpu,dev]') && $$pip --no-deps mxnet==1.9.1 || \
	    { echo "setting up $(VENV) failed (see above): it needs network access (or PIP_INDEX_URL), 660 MB, and a writable checkout" >&2; exit 1; }
	@touch $@

clean:  ## remove .venv, .venvs and all build output
	rm -rf $(VENV) .venvs build dist docs/api *.egg-info

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)
