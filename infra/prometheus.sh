#!/bin/sh
# Ensure Prometheus' programs in .venv/bin, for the checks of alert rules and of the dashboard: link the installed ones, or
# extract them from Debian's package without installing it, so that no server is started. Without them, these checks are
# skipped, with a message.
set -eu
cd "$(dirname "$0")/.."

if ! [ -x .venv/bin/promtool ] || ! [ -x .venv/bin/prometheus ]; then
    if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
        ln -sf "$(command -v promtool)" "$(command -v prometheus)" .venv/bin/
    elif command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
        echo "no Prometheus: extracting its programs from Debian's package" >&2
        [ "$(id -u)" != 0 ] || apt-get update -qq
        place="$(mktemp -d)"
        (cd "$place" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1 &&
            mv "$place/usr/bin/promtool" "$place/usr/bin/prometheus" .venv/bin/ || true
        rm -rf "$place"
    fi
fi
[ -x .venv/bin/promtool ] || echo "no Prometheus: the rules and the dashboard's queries are not checked" >&2
