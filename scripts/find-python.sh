#!/bin/sh
# Prints the path of a Python (3.9 or newer) that can create virtual environments. If there is none, or if MXNet does
# not run on this machine, prints a one-line error and fails. PYTHON=python3.12 (or a path) in the environment selects a
# Python. Versions after 3.15 were never tried; one line says so.
suitable='import ctypes, ensurepip, sys, venv; sys.exit(sys.version_info < (3, 9))'
tried='import sys; sys.exit(sys.version_info[:2] > (3, 15))'
case $(uname -sm) in
    "Linux x86_64" | "Linux aarch64") ;;
    *)
        instead="use Linux on x86-64 or aarch64, also in a container or in WSL, or MXNet 2's wheels (docs/install.md)"
        echo "this machine is $(uname -sm): $instead" >&2
        exit 1
        ;;
esac
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
case ${PYTHON:-} in
    "")
        set -- python3.11 python3.12 python3.10 python3.9 python3.13 python3.14 python3.15 python3 \
            "$pyenv"/3.*/bin/python
        ;;
    python3.*) set -- "$PYTHON" "$pyenv/${PYTHON#python}".*/bin/python ;;
    *) set -- "$PYTHON" ;;
esac
for python; do
    if "$python" -c "$suitable" >/dev/null 2>&1; then
        "$python" -c "$tried" || echo "$("$python" --version) was never tried with this project" >&2
        command -v "$python"
        exit 0
    fi
done
needed="install Python 3.9 or newer with its venv module (Debian, Ubuntu: python3-venv)"
echo "no suitable Python${PYTHON:+ for PYTHON=$PYTHON}: $needed" >&2
exit 1
