#!/bin/sh
# Create .venv from requirements.lock, with hashes, with the first Python 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

if ! [ -x .venv/bin/pip ]; then
    python=
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if fits "$candidate"; then python=$candidate; break; fi
    done
    if [ -z "$python" ]; then
        echo "no Python 3.11 to 3.13: install it, or name it: make PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    # Debian has a separate package for venv.
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"
        else
            echo "$python cannot make virtual environments: install $package" >&2
            exit 1
        fi
    fi
    "$python" -m venv .venv
fi

echo "installing the locked requirements into .venv (minutes the first time)"
# Modules are compiled at their first import: most of them are never imported.
.venv/bin/pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r requirements.lock
# The distribution was named sluice: its metadata and script would stay beside those of kafka-sluice.
for old in .venv/lib/python3*/site-packages/sluice-*.dist-info; do
    if [ -d "$old" ]; then .venv/bin/pip uninstall --quiet --disable-pip-version-check --yes sluice; fi
done
# setuptools is in the lock, so that building the package downloads nothing.
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
.venv/bin/python -m sluice.pipelines.records.compiled.cache
