#!/bin/sh
# Sets up a virtual environment for the Makefile.
#   set-up.sh VENV other             prints "yes" if $PYTHON is not of the same version as VENV's Python
#   set-up.sh VENV train|dev STAMP   installs what training needs, or what tests and lint need, and touches STAMP
# MXNET says which MXNet to install, and NUMPY which NumPy. If pip fails, the VENV that was there stays; it is used if
# it works.
set -u
venv=$1
what=$2
here=$(dirname "$0")

version() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null; }

is_other() {
    [ -n "${PYTHON:-}" ] || return
    found=$("$here/find-python.sh" 2>/dev/null)
    [ "$(version "$found")" != "$(version "$venv/bin/python")" ]
}

fail() {
    if [ -d "$venv.old" ]; then
        rm -rf "$venv"
        mv "$venv.old" "$venv"
    fi
    exit 1
}

create() {
    python=$("$here/find-python.sh") || fail
    echo "setting up $venv with $("$python" --version) ($python)"
    [ ! -e "$venv" ] || [ -e "$venv.old" ] || mv "$venv" "$venv.old"
    "$python" -m venv --clear "$venv" || fail
}

pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "$@"; }

install() {
    if [ "$what" = dev ]; then
        pip --editable '.[dev]'
    elif [ -n "${NUMPY:-}" ]; then
        pip --no-deps "$MXNET" && pip --editable . "numpy==$NUMPY.*"
    else
        pip --no-deps "$MXNET" && pip --editable '.[cpu]'
    fi
}

case $what in
    other)
        ! is_other || echo yes
        exit
        ;;
    train)
        if is_other || ! "$venv/bin/python" -c '' 2>/dev/null; then create; fi
        echo "installing MXNet (47 MB to download), NumPy, Matplotlib and other packages (43 MB)"
        works='import gluon_mgpu, mxnet' space="410 MB"
        ;;
    dev)
        echo "installing pytest, mypy and other tools (57 MB to download)"
        works='import pytest' space="240 MB"
        ;;
esac
stamp=$3

if said=$(install 2>&1); then
    rm -rf "$venv.old"
    for other in "$venv"/.*installed*; do
        case $other in
            *installed"${NUMPY:+-numpy-$NUMPY}") ;;
            *) rm -f "$other" ;;
        esac
    done
    touch "$stamp"
elif [ -e "$stamp" ] && "$venv/bin/python" -c "$works" 2>/dev/null; then
    why=$(echo "$said" | grep -o -m 1 'ERROR: .*')
    echo "$venv still works and is used as it is, because it could not be updated: $why"
else
    echo "$said" >&2
    needed="network access (or PIP_INDEX_URL), a writable checkout, and $space"
    echo "setting up $venv failed (see above): it needs $needed" >&2
    fail
fi
