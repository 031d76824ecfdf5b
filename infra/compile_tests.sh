#!/bin/sh
# Compile the tests and the packages that they import, on two cores, unless that was done: in a fresh clone each of
# pytest's workers would compile all of them at the same time.
set -eu
cd "$(dirname "$0")/.."
[ ! -d tests/__pycache__ ] || exit 0
collect() { .venv/bin/python -m pytest --collect-only --quiet "$@" >/dev/null 2>&1 || true; }
set -- tests/pipelines tests/integration tests/model
collect "$@" &
collect tests --ignore "$1" --ignore "$2" --ignore "$3"
wait
