#!/bin/sh
# Prints a Python that can run MXNet 1.9.1 (3.9 to 3.13) and create virtual environments. If there is none, or if MXNet
# does not run on this machine, it fails with one line. PYTHON=python3.12 (or a path) in the environment skips the search.
suitable='import ctypes, ensurepip, sys, venv; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'
machine="this machine is $(uname -sm), but this project is tested on x86-64 Linux"
case $machine in
    *"Linux x86_64,"*) ;;
    *"Linux aarch64,"*) echo "$machine only" >&2 ;;  # MXNet has a wheel for it
    *) echo "$machine: use such a machine, or a container" >&2; exit 1 ;;
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
echo "no suitable Python${PYTHON:+ in PYTHON=$PYTHON}: install Python 3.9 to 3.13 with its venv module (Debian, Ubuntu: python3-venv)" >&2
exit 1
