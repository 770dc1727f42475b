#!/bin/sh
# The suite with each Python that suits, each in an environment of its own under .venvs/, and a table of what ran.
# PYTHONS="3.9 3.9:1.22 3.12:2.1" chooses Pythons, after the colon NumPy; TESTS="tests/test_step.py" what pytest runs.
# Fails where anything did, and where a Python asked for is missing.
cd "$(dirname "$0")/.." || exit 1
if [ -z "${PYTHONS:-}" ]; then
    for minor in 9 10 11 12 13; do
        PYTHON=python3.$minor scripts/find-python.sh >/dev/null 2>&1 && PYTHONS="${PYTHONS:-} 3.$minor"
    done
    # The lowest NumPy with the lowest Python too.
    case "$PYTHONS " in *" 3.9 "*) PYTHONS="$PYTHONS 3.9:1.22" ;; esac
fi
[ -n "$PYTHONS" ] || exec scripts/find-python.sh  # says which suit

status=0
table=
row() {
    table="$table$(printf '%-10s %-10s %-14s %-10s %s' "$@")
"
}
row Python NumPy "MXNet imports" "main job" suite
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'printf "\n%s" "$table"' EXIT  # what has run, also where this is interrupted

# Runs a command with its output in a log of the environment; sets $is to what the table says of it. A hang ends too.
try() {
    log=$venv/$1.log
    shift
    if timeout --foreground 2h "$@" >"$log" 2>&1; then is=yes; else is="no ($?)"; fi
    [ "$is" = yes ] || { status=1; echo "failed, $log ends with:"; tail -n 5 "$log"; }
}

for wanted in $PYTHONS; do
    numpy=${wanted#*:}
    [ "$numpy" = "$wanted" ] && numpy=
    venv=.venvs/$(echo "$wanted" | tr : -)
    python=$venv/bin/python
    if ! make -s install "VENV=$venv" "PYTHON=python${wanted%:*}" "NUMPY=$numpy"; then
        status=1
        row "${wanted%:*}" "$numpy" "not installed" "" ""
        continue
    fi
    version=$($python -c 'import platform; print(platform.python_version())')
    numpy=$($python -c 'from importlib import metadata; print(metadata.version("numpy"))')
    echo "Python $version, NumPy $numpy: import, main job, suite ($venv/suite.log)"
    try import "$python" -c 'import gluon_mgpu; gluon_mgpu.configure(2); import mxnet; print(mxnet.nd.ones(3))'
    imports=$is
    try train "$python" scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 2048 --epochs 1
    trains=$is
    # shellcheck disable=SC2086
    try suite "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow" -p no:cacheprovider $TESTS
    summary=$(tail -n 1 "$venv/suite.log" | sed -n 's/ in [0-9.]*s.*//p')
    row "$version" "$numpy" "$imports" "$trains" "${summary:-$is}"
done
exit $status
