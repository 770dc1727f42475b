#!/bin/sh
# Runs the test suite with every suitable Python, each in its own environment under .venvs/, and prints a table.
# PYTHONS="3.9 3.9:1.22 3.12:2.1" selects versions of Python and, after a colon, NumPy; TESTS="tests/training" selects
# tests. Fails if an installation or a command fails, or if a selected Python is missing.
cd "$(dirname "$0")/.." || exit 1
if [ -z "${PYTHONS:-}" ]; then
    for minor in 9 10 11 12 13 14 15; do
        PYTHON=python3.$minor scripts/find-python.sh >/dev/null 2>&1 && PYTHONS="${PYTHONS:-} 3.$minor"
    done
    # The oldest Python also runs with the oldest NumPy.
    case "$PYTHONS " in *" 3.9 "*) PYTHONS="$PYTHONS 3.9:1.22" ;; esac
fi
[ -n "$PYTHONS" ] || exec scripts/find-python.sh  # says which Pythons are suitable

status=0
table=
row() {
    table="$table$(printf '%-10s %-10s %-14s %-10s %s' "$@")
"
}
row Python NumPy "MXNet imports" "main job" suite
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'printf "\n%s" "$table"' EXIT  # also if the script is interrupted

# try NAME COMMAND: runs a command with a time limit, logs its output to NAME.log, and sets $result to its table entry.
try() {
    log=$venv/$1.log
    shift
    if timeout --foreground 2h "$@" >"$log" 2>&1; then result=yes; else result="no ($?)"; fi
    [ "$result" = yes ] || { status=1; echo "failed; $log ends with:"; tail -n 5 "$log"; }
}

for selected in $PYTHONS; do
    numpy=${selected#*:}
    [ "$numpy" = "$selected" ] && numpy=
    venv=.venvs/$(echo "$selected" | tr : -)
    python=$venv/bin/python
    if ! make -s dev "VENV=$venv" "PYTHON=python${selected%:*}" "NUMPY=$numpy"; then
        status=1
        row "${selected%:*}" "$numpy" "not installed" "" ""
        continue
    fi
    version=$($python -c 'import platform; print(platform.python_version())')
    numpy=$($python -c 'from importlib import metadata; print(metadata.version("numpy"))')
    echo "Python $version, NumPy $numpy: import, main job, suite ($venv/suite.log)"
    try import "$python" -c 'import gluon_mgpu; gluon_mgpu.configure(2); import mxnet; print(mxnet.nd.ones(3))'
    imports=$result
    try train "$python" scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 2048 --epochs 1
    trains=$result
    # shellcheck disable=SC2086
    try suite "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow" -p no:cacheprovider $TESTS
    summary=$(tail -n 1 "$venv/suite.log" | sed -n 's/ in [0-9.]*s.*//p')
    row "$version" "$numpy" "$imports" "$trains" "${summary:-$result}"
done
exit $status
