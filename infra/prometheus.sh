#!/bin/sh
# Sees to it that Prometheus' programs are in .venv/bin, for the checks of alert rules and of the dashboard: links those of
# this machine, or takes them out of Debian's package, which is not installed, so that no server is started. Where neither
# can be had, these checks are left out, and named.
set -eu
cd "$(dirname "$0")/.."

if ! [ -x .venv/bin/promtool ] || ! [ -x .venv/bin/prometheus ]; then
    if command -v promtool >/dev/null && command -v prometheus >/dev/null; then
        ln -sf "$(command -v promtool)" "$(command -v prometheus)" .venv/bin/
    elif command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
        echo "no Prometheus here: taking its programs out of Debian's package" >&2
        [ "$(id -u)" != 0 ] || apt-get update -qq
        place="$(mktemp -d)"
        (cd "$place" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1 &&
            mv "$place/usr/bin/promtool" "$place/usr/bin/prometheus" .venv/bin/ || true
        rm -rf "$place"
    fi
fi
[ -x .venv/bin/promtool ] || echo "no Prometheus: its rules and the dashboard's queries are not tried" >&2
