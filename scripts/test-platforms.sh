#!/bin/sh
# Tests this checkout on other platforms, each in a new root file system from Debian's packages: python3.14 and
# python3.15 from Debian unstable, and arm64, emulated by qemu, from Debian stable. In each: `make demo`, the numerical
# tests, one resume, and conversion. Needs root, debootstrap and, for arm64, qemu-user-static.
#   test-platforms.sh [python3.14|python3.15|arm64]...    default: all
# FOLDER keeps the file systems; QUICK=1: without tests.
set -eu
checkout=$(cd "$(dirname "$0")/.." && pwd)
folder=${FOLDER:-$checkout/build/platforms}
[ "$(id -u)" = 0 ] || { echo "run this as root" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "run apt install debootstrap" >&2; exit 1; }
status=0
table="platform    result   seconds"

emulate() {  # lets this machine run arm64 programs
    [ "$(uname -m)" = aarch64 ] && return
    export QEMU_CPU=cortex-a76  # PyTorch does not run on cortex-a72; with SVE, qemu 7.2 computes wrong products
    [ -e /proc/sys/fs/binfmt_misc/status ] || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] && return
    # F: the interpreter is opened now, so that the root file systems need none.
    sed 's#:[^:]*:[A-Z]*$#:/usr/bin/qemu-aarch64-static:OPF#' /usr/lib/binfmt.d/qemu-aarch64*.conf | head -n 1 \
        > /proc/sys/fs/binfmt_misc/register
}

create() {  # create ROOT PLATFORM: makes a root file system that has PLATFORM's Python
    packages=python3,python3-venv,libgomp1,ca-certificates,make
    if [ "$2" = arm64 ]; then
        debootstrap --arch=arm64 --variant=minbase --include=$packages stable "$1" ${MIRROR:-}
    else
        debootstrap --variant=minbase --include=$packages,libquadmath0 sid "$1" ${MIRROR:-}
        cp /etc/resolv.conf "$1/etc/"
        chroot "$1" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$2-venv"
    fi >/dev/null
}

try() {  # try ROOT PYTHON: copies the checkout into a root file system and tests it there
    cp /etc/resolv.conf /etc/hosts "$1/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/"  # also certificates that only this machine has
    [ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$1/etc/"
    rm -rf "$1/checkout"
    mkdir "$1/checkout"
    (cd "$checkout" && git ls-files -z | xargs -0 tar c) | tar x -C "$1/checkout"
    # The mounts end with the command, however it ends.
    unshare --mount sh -euc 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; mount --rbind /sys "$0/sys"
        exec chroot "$0" "$@"' "$1" env -i HOME=/root PATH=/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 \
        ${QEMU_CPU:+QEMU_CPU=$QEMU_CPU} PYTHON="$2" QUICK="${QUICK:-}" sh -euc '
        cd /checkout
        make demo PYTHON=$PYTHON
        .venv/bin/python scripts/train.py --dataset synthetic --limit 600 --epochs 1 --out /tmp/run
        .venv/bin/python scripts/train.py --resume /tmp/run --epochs 2
        rm -r /tmp/run
        [ -z "$QUICK" ] || exit 0
        make dev PYTHON=$PYTHON
        # Without these packages, tests of conversion are skipped.
        make torch && .venv/bin/python -m pip install --quiet --editable ".[onnx]" ||
            .venv/bin/python -m pip install --quiet safetensors ruff
        .venv/bin/python -m pytest -rs -n auto --maxprocesses 4 --dist loadfile tests/test_steps.py \
            tests/test_lessons.py tests/test_partition.py tests/compat tests/support tests/test_convert.py'
}

for platform in ${*:-python3.14 python3.15 arm64}; do
    root=$folder/$platform python=$platform begin=$(date +%s) result=passed
    if [ "$platform" = arm64 ]; then
        emulate
        python=python3
    fi
    [ -e "$root/usr/bin/make" ] || create "$root" "$platform"
    try "$root" "$python" || { result=failed status=1; }
    table="$table
$(printf '%-11s %-8s %7d' "$platform" "$result" $(($(date +%s) - begin)))"
done
echo "$table"
exit $status
