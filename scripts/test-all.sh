#!/bin/sh
# The suite with each Python that suits, each in an environment of its own under .venvs/, and a table of what ran.
# PYTHONS="3.9 3.9:1.22 3.12:2.1" chooses Pythons, after the colon NumPy; TESTS="tests/test_step.py" what pytest runs.
# Fails where anything did, and where a Python asked for is missing.
cd "$(dirname "$0")/.." || exit 1
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -z "${PYTHONS:-}" ]; then
    for minor in 9 10 11 12 13; do
        PYTHON=python3.$minor scripts/find-python.sh >/dev/null 2>&1 && PYTHONS="${PYTHONS:-} 3.$minor"
    done
    # The lowest NumPy with the lowest Python too.
    case "$PYTHONS " in *" 3.9 "*) PYTHONS="$PYTHONS 3.9:1.22" ;; esac
fi
[ -n "$PYTHONS" ] || exec scripts/find-python.sh  # says which suit

row='%-10s %-10s %-14s %-10s %s\n'
# shellcheck disable=SC2059
table=$(printf "$row" Python NumPy "MXNet imports" "main job" suite)
status=0

# Runs a command with its output in a log of the environment; sets $is to what the table says of it.
try() {
    log=$venv/$1.log
    shift
    if "$@" >"$log" 2>&1; then is=yes; else is=no; status=1; echo "failed, $log ends with:" && tail -n 5 "$log"; fi
}

for wanted in $PYTHONS; do
    numpy=${wanted#*:}
    [ "$numpy" = "$wanted" ] && numpy=
    venv=.venvs/$(echo "$wanted" | tr : -)
    python=$venv/bin/python
    if ! make -s install "VENV=$venv" "PYTHON=python${wanted%:*}" "NUMPY=$numpy"; then
        status=1
        table="$table
$(printf "$row" "${wanted%:*}" "$numpy" "not installed" "" "")"
        continue
    fi
    versions=$($python -c 'import platform, numpy; print(platform.python_version(), numpy.__version__)')
    echo "Python and NumPy $versions: import, main job, suite ($venv/suite.log)"
    try import "$python" -c 'import gluon_mgpu; gluon_mgpu.configure(2); import mxnet; print(mxnet.nd.ones(3))'
    imports=$is
    try train "$python" scripts/train.py --impl scratch --gpus 2 --dataset synthetic --limit 2048 --epochs 1
    trains=$is
    # shellcheck disable=SC2086
    try suite "$python" -m pytest -m "not slow" -p no:cacheprovider $TESTS
    table="$table
$(printf "$row" $versions "$imports" "$trains" "$(tail -n 1 "$venv/suite.log" | sed 's/ in [0-9].*//')")"
done
printf '\n%s\n' "$table"
exit $status
