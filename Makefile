# Each target sets up what it needs in .venv: make train only what training needs, make test also the tools for tests.
# PYTHON=python3.12 selects the interpreter, NUMPY=2.1 the NumPy version. A .venv with a different version of either is
# replaced.
VENV := .venv
export MXNET := mxnet==1.9.1
export NUMPY PYTHON
BIN := $(VENV)/bin
# MXNet's metadata pins an old NumPy. It works with newer ones (docs/install.md), so pip does not report the conflict.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts
INSTALLED := $(VENV)/.installed$(NUMPY:%=-numpy-%)
DEV_INSTALLED := $(VENV)/.dev-installed$(NUMPY:%=-numpy-%)

.PHONY: train demo test test-all test-mxnet2 test-platforms test-cuda test-gpu torture parity docs test-docs lint audit \
    install dev torch clean help
.DELETE_ON_ERROR:

SET_UP := scripts/set-up.sh $(VENV)
ifeq ($(shell PYTHON='$(PYTHON)' $(SET_UP) other),yes)
.PHONY: $(INSTALLED)
endif

train: install  ## train LeNet from scratch on Fashion-MNIST, on 2 devices: the main job
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --batch-size 256 --lr 0.2 --epochs 4

demo: install  ## train LeNet on ten classes of synthetic pictures, on 2 devices (ten seconds)
	$(BIN)/python scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 6000 --batch-size 32 --lr 0.2 --epochs 3

PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: dev  ## test the main claim of each feature; DNNL_MAX_CPU_ISA=SSE41 make test uses an older processor's instructions
	$(PYTEST) -m "not slow"

test-all: dev  ## run all tests, which takes much longer
	$(PYTEST)

MXNET2_TESTS := tests/test_steps.py tests/compat/test_mxnet2.py $(if $(QUICK),,tests/test_lessons.py \
    tests/test_partition.py tests/test_evaluate.py tests/training/test_resume.py)
test-mxnet2:  ## run the lessons' tests with MXNet 2.0.0b1 in .venvs/mxnet2 (200 MB to download): QUICK=1 for the steps only
	$(MAKE) dev VENV=.venvs/mxnet2 MXNET=mxnet==2.0.0b1 NUMPY=2
	.venvs/mxnet2/bin/python -m pytest -n 2 --dist loadfile -m "not slow" $(MXNET2_TESTS)

test-platforms:  ## test Python 3.14 and 3.15, and aarch64 under qemu, in new root file systems (needs root and Debian): PLATFORMS=...
	scripts/test-platforms.sh $(PLATFORMS)

test-cuda: dev  ## test mxnet-cu112 with NVIDIA's wheels in a separate environment (2.1 GB to download)
	$(BIN)/python -m pytest -m cuda_wheels

test-gpu: dev  ## test the lessons on a GPU, against CPU contexts: needs an MXNet that works on it (docs/install.md)
	mkdir -p build && cc -shared -fPIC -o build/two_devices.so tests/two_devices.c -ldl
	LD_PRELOAD=$(CURDIR)/build/two_devices.so $(BIN)/python -m pytest -m gpu -rs

MINUTES := 30
SEED := 1
torture: dev  ## test random runs with random faults, and fuzz every file reader: MINUTES=30 SEED=1
	$(BIN)/python tests/torture/torture.py --minutes $(MINUTES) --seed $(SEED)

parity: install  ## compare this project's results with everything that the notebooks printed: QUICK=1 for one run of each of two recipes
	$(BIN)/python scripts/parity.py $(if $(QUICK),--quick)

docs: torch  ## build the website in build/docs, and its lessons as executed notebooks: QUICK=1 with few examples; slow cells do not run
	$(PIP) --editable '.[docs,mpi]'
	rm -rf build/docs docs/api
	$(if $(QUICK),GLUON_MGPU_DOCS_QUICK=1) $(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/docs/notebooks .
	@echo "open build/docs/index.html in a browser; the notebooks are in build/docs/notebooks"

test-docs: dev docs  ## build the website, and test it
	$(BIN)/python -m pytest -m notebooks tests/test_site.py

lint: dev  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: install  ## run bandit, and check all installed packages for known vulnerabilities (needs the network)
	$(PIP) --editable '.[audit]'
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive gluon_mgpu scripts
	$(BIN)/pip-audit --local --skip-editable

install: $(INSTALLED)  ## set up .venv with what training needs, and do nothing else

$(INSTALLED): setup.cfg scripts/find-python.sh scripts/set-up.sh
	@$(SET_UP) train $@

dev: $(DEV_INSTALLED)  ## set up .venv with what training, tests and lint need

$(DEV_INSTALLED): $(INSTALLED)
	@$(SET_UP) dev $@

# The default package index has only PyTorch's CUDA build, several GB, for x86-64 Linux, and for aarch64 from 2.11 on. A
# mirror of it may have the CPU build; otherwise, uv knows where that is.
TORCH := $(if $(filter aarch64,$(shell uname -m)),'torch<2.11','torch==2.13.0+cpu')
torch: install  ## install PyTorch's CPU build (190 MB to download)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) --no-compile $(TORCH) 2>/dev/null || { \
	    $(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend cpu 'torch >= 2.6'; }

clean:  ## remove .venv, .venvs and all build output
	rm -rf $(VENV) $(VENV).old .venvs build dist docs/api *.egg-info

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /\1: /p' $(MAKEFILE_LIST)
