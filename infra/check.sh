#!/bin/sh
# Lint, format, types, import rules, language, docs and definitions. All checks run; any failure fails.
set -u
cd "$(dirname "$0")/.."
status=0

# Editors resolve every import of the project. Packages of the benchmark's peers are not installed here.
# The slowest check, so it runs in the background.
missing="$(mktemp)"
.venv/bin/basedpyright --level error >"$missing" &
editor=$!

.venv/bin/ruff check . || status=1
.venv/bin/ruff format --check . || status=1
.venv/bin/mypy || status=1
.venv/bin/lint-imports --cache-dir .import_linter_cache || status=1
# Broken links and anchors of the docs fail.
.venv/bin/python infra/site.py || status=1
.venv/bin/python infra/language.py || status=1
.venv/bin/dg check defs || status=1
infra/deployments.sh || status=1
wait "$editor"
if grep -E 'Import "(sluice|tests)[."]' "$missing"; then status=1; fi
rm "$missing"
exit $status
