#!/bin/sh
# Prints a Python that MXNet 1.9.1 runs on, 3.9 to 3.13, and that can make virtual environments; fails with one line,
# also on a machine that MXNet does not run on.
# PYTHON=python3.12, or a path, in the environment is taken instead of searching.
suits='import ctypes, ensurepip, sys, venv; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))'
machine="this machine is $(uname -sm), and this project was tried on x86-64 Linux"
case $machine in
    *"Linux x86_64,"*) ;;
    *"Linux aarch64,"*) echo "$machine only" >&2 ;;  # which MXNet has a wheel for
    *) echo "$machine: use such a one, or a container of it" >&2; exit 1 ;;
esac
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
case ${PYTHON:-} in
    "") set -- python3.11 python3.12 python3.10 python3.9 python3.13 python3 "$pyenv"/3.*/bin/python ;;
    python3.*) set -- "$PYTHON" "$pyenv/${PYTHON#python}".*/bin/python ;;
    *) set -- "$PYTHON" ;;
esac
for python; do
    if "$python" -c "$suits" >/dev/null 2>&1; then
        command -v "$python"
        exit 0
    fi
done
echo "no suitable Python${PYTHON:+ in PYTHON=$PYTHON}: install one of 3.9, 3.10, 3.11, 3.12 and 3.13 with its venv module (Debian, Ubuntu: python3-venv)" >&2
exit 1
