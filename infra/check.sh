#!/bin/sh
# Lint, format, types, import rules, definitions that load: what must hold before any test is run.
# Every check runs; any failure fails.
set -u
cd "$(dirname "$0")/.."
root=$(pwd)
status=0

.venv/bin/ruff check . || status=1
.venv/bin/ruff format --check . || status=1

# mypy and import-linter do not follow the mapping of root folders into one package: a tree of links shows it.
tree=.venv/typing
rm -rf "$tree"
mkdir -p "$tree/sluice"
for folder in pipelines resources assets cli bench; do ln -s "$root/$folder" "$tree/sluice/$folder"; done
for file in sluice/*; do
    case $file in *__pycache__) ;; *) ln -s "$root/$file" "$tree/$file" ;; esac
done
(
    cd "$tree" || exit 1
    "$root/.venv/bin/mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p sluice
) || status=1
(
    cd "$tree" || exit 1
    "$root/.venv/bin/lint-imports" --config "$root/pyproject.toml" --cache-dir "$root/.import_linter_cache"
) || status=1
.venv/bin/dg check defs || status=1
exit $status
