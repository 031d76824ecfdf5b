#!/bin/sh
# Build dist/kafka_sluice-*.whl with its compiled loops. Uses .venv, else an environment of a few packages below build/.
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
rm -rf build/lib build/bdist.*
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
ls -t dist/*.whl | head -n 1
