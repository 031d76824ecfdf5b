#!/bin/sh
# Build dist/kafka_sluice-*.whl with its compiled loops. On x86-64 that needs a C compiler, which links them; elsewhere the
# wheel has no loops. Uses .venv of `make setup`, else an environment of a few locked packages below build/.
set -eu
cd "$(dirname "$0")/.."

platform=any
if [ "$(uname -m)" = x86_64 ]; then
    # The library calls memcpy and memset and nothing else.
    platform=manylinux_2_17_x86_64
    if ! command -v cc >/dev/null; then
        echo "the wheel needs a C compiler named cc: install gcc, and run again" >&2
        exit 1
    fi
    if ! grep -qsw avx2 /proc/cpuinfo; then
        echo "the wheel's loops are compiled on a processor with AVX2, which this one lacks: build it on another" >&2
        exit 1
    fi
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
# Seconds, unless the loops changed. Loops of this user's cache would not be packed.
env -u NUMBA_CACHE_DIR XDG_CACHE_HOME="$PWD/build/cache" PYTHONPATH=src "$python" -m sluice.pipelines.records.compiled.cache
if [ "$platform" != any ] && ! ls pipelines/records/compiled/loops/*.so >/dev/null 2>&1; then
    echo "cc linked no library of the loops: the wheel needs one" >&2
    exit 1
fi
# setuptools packs whatever an earlier build left there.
rm -rf build/lib build/bdist.* dist/kafka_sluice-*.whl
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings=--build-option=--plat-name="$platform" --wheel-dir dist .
ls -t dist/*.whl | head -n 1
