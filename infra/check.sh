#!/bin/sh
# Lint, format, types, import rules, language, docs and definitions. All checks run; any failure fails.
set -u
cd "$(dirname "$0")/.."
status=0

# Editors resolve every import of the project: one file has each module that any file imports. Checking all files takes
# a minute.
mkdir -p build
grep -RhE '^ *(from|import) (sluice|tests|bench)\b' src tests bench --include='*.py' |
    sed -nE 's/^ *(from|import) ((sluice|tests|bench)[.A-Za-z0-9_]*).*/import \2/p' | sort -u >build/imports.py
missing="$(mktemp)"
.venv/bin/basedpyright --level error build/imports.py >"$missing" &
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
wait "$editor" || { cat "$missing" >&2; status=1; }
rm "$missing"
exit $status
