#!/bin/sh
# Ensure PostgreSQL's programs, for the tests of Dagster on it: find them, or install them with apt as root. Without
# them, these tests are skipped.
set -eu

found() { command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; }

if ! found && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no PostgreSQL: installing it with apt" >&2
    apt-get update -qq
    # Without the default cluster of Debian, which would be started.
    mkdir -p /etc/postgresql-common
    [ -e /etc/postgresql-common/createcluster.conf ] || echo "create_main_cluster = false" \
        >/etc/postgresql-common/createcluster.conf
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null 2>&1 || true
fi
found || echo "no PostgreSQL: the tests of Dagster on it are skipped" >&2
