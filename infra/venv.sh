#!/bin/sh
# Create .venv from requirements.lock, with hashes, with the first Python 3.11 to 3.13.
set -eu
cd "$(dirname "$0")/.."

if ! [ -x .venv/bin/pip ]; then
    python="$(infra/python.sh)"
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
