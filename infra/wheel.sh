#!/bin/sh
# Build dist/kafka_sluice-*.whl with the compiled loops of this processor's architecture, which a C compiler links. Uses .venv
# of `make setup`, else an environment of a few locked packages below build/.
set -eu
cd "$(dirname "$0")/.."

if [ "$(uname -s)" != Linux ]; then
    echo "the wheel's loops are for Linux: elsewhere, 'pip install .' installs Sluice without them, for reading" >&2
    exit 1
fi
if ! command -v cc >/dev/null; then
    echo "the wheel needs a C compiler named cc: install gcc, and run again" >&2
    exit 1
fi
if [ "$(uname -m)" = x86_64 ] && ! grep -qsw avx2 /proc/cpuinfo; then
    echo "the wheel's loops are compiled on a processor with AVX2, which this one lacks: build it on another" >&2
    exit 1
fi
python=.venv/bin/python
if ! [ -e .venv/.ready ]; then
    python=build/wheel/bin/python
    if ! [ -x build/wheel/bin/pip ]; then
        base="$(infra/python.sh)"
        "$base" -m venv build/wheel
    fi
    "$python" infra/wheel_requirements.py >build/wheel/requirements.txt
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps \
        -r build/wheel/requirements.txt
fi
# Seconds, unless the loops changed.
env -u NUMBA_CACHE_DIR PYTHONPATH=src "$python" infra/loops.py
# setuptools packs whatever an earlier build left there.
rm -rf build/lib build/bdist.* dist/kafka_sluice-*.whl
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings=--build-option=--plat-name="manylinux_2_17_$(uname -m)" --wheel-dir dist .
ls -t dist/*.whl | head -n 1
