#!/bin/sh
# Ensure Java 17 or newer: find it, install it with apt as root, or print the package to install.
set -eu
cd "$(dirname "$0")/.."

found() { .venv/bin/python -m sluice.resources.local.java; }

if ! found >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no Java 17 or newer: installing it with apt" >&2
    apt-get update -qq
    for version in 17 21 25; do
        if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            "openjdk-$version-jre-headless" >/dev/null 2>&1; then break; fi
    done
fi
found >/dev/null
# With an archive of its classes, Spark starts with half the CPU. The archive is optional.
.venv/bin/python -m sluice.resources.spark.jvm || true
