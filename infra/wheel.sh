#!/bin/sh
# Build dist/kafka_sluice-*.whl with its compiled loops. On x86-64 that needs a C compiler, which links them; elsewhere the
# wheel has no loops. Uses .venv, else an environment of a few packages below build/.
set -eu
cd "$(dirname "$0")/.."

python=.venv/bin/python
if ! [ -x "$python" ]; then
    python=build/wheel/bin/python
    if ! [ -x "$python" ]; then
        "${PYTHON:-python3.11}" -m venv build/wheel
    fi
    # The loops' own requirements, in the versions of the lock.
    sed -n 's/^\(numba\|llvmlite\|numpy\|pyarrow\|pydantic\|setuptools\)==\([^ ]*\).*/\1==\2/p' requirements.lock |
        build/wheel/bin/pip install --quiet --disable-pip-version-check -r /dev/stdin
fi
# Seconds, unless the loops changed. Loops of this user's cache would not be packed.
env -u NUMBA_CACHE_DIR XDG_CACHE_HOME="$PWD/build/cache" PYTHONPATH=src "$python" -m sluice.pipelines.records.compiled.cache
# setuptools packs whatever an earlier build left there.
rm -rf build/lib build/bdist.* dist/kafka_sluice-*.whl
# The library calls memcpy and memset and nothing else.
platform=any
if [ "$(uname -m)" = x86_64 ]; then
    platform=manylinux_2_17_x86_64
    if ! ls pipelines/records/compiled/loops/*.so >/dev/null; then
        echo "no C compiler named cc, or no processor with AVX2: the wheel needs both" >&2
        exit 1
    fi
fi
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --config-settings=--build-option=--plat-name="$platform" --wheel-dir dist .
ls -t dist/*.whl | head -n 1
