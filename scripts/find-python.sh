#!/bin/sh
# Prints the path of a Python that can run MXNet 1.9.1 (3.9 to 3.13) and create virtual environments. If there is none,
# or if MXNet does not run on this machine, prints a one-line error and fails. PYTHON=python3.12 (or a path) in the
# environment selects a Python.
suitable='import ctypes, ensurepip, sys, venv; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'
machine="this machine is $(uname -sm), but this project is tested on x86-64 Linux"
case $machine in
    *"Linux x86_64,"*) ;;
    *"Linux aarch64,"*) echo "$machine only" >&2 ;;  # MXNet has a wheel for aarch64
    *) echo "$machine: use an x86-64 Linux machine or container" >&2; exit 1 ;;
esac
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
case ${PYTHON:-} in
    "") set -- python3.11 python3.12 python3.10 python3.9 python3.13 python3 "$pyenv"/3.*/bin/python ;;
    python3.*) set -- "$PYTHON" "$pyenv/${PYTHON#python}".*/bin/python ;;
    *) set -- "$PYTHON" ;;
esac
for python; do
    if "$python" -c "$suitable" >/dev/null 2>&1; then
        command -v "$python"
        exit 0
    fi
done
echo "no suitable Python${PYTHON:+ for PYTHON=$PYTHON}: install Python 3.9 to 3.13 with its venv module (Debian, Ubuntu: python3-venv)" >&2
exit 1
