#!/bin/sh
# Lint, format, types, import rules, definitions that load: what must hold before any test is run.
# Every check runs; any failure fails.
set -u
cd "$(dirname "$0")/.."
status=0

# An editor finds every import of ours. Packages of the benchmark's peers are fetched for them alone, and not here.
# It takes the longest, and runs beside the others.
missing="$(mktemp)"
.venv/bin/basedpyright --level error >"$missing" &
editor=$!

.venv/bin/ruff check . || status=1
.venv/bin/ruff format --check . || status=1
.venv/bin/mypy || status=1
.venv/bin/lint-imports --cache-dir .import_linter_cache || status=1
# Every link and anchor of the docs leads somewhere.
.venv/bin/python infra/site.py || status=1
.venv/bin/python infra/language.py || status=1
.venv/bin/dg check defs || status=1
infra/deployments.sh || status=1
wait "$editor"
if grep -E 'Import "(sluice|tests)[."]' "$missing"; then status=1; fi
rm "$missing"
exit $status
