#!/bin/sh
# Ensure a KDC's programs, and gssapi in .venv, for the tests of Kerberos: find them, or install them with apt as root,
# and compile gssapi. Without them, these tests are skipped.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/sbin"

if ! { command -v krb5kdc && command -v kinit; } >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no KDC: installing MIT's with apt" >&2
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        krb5-kdc krb5-admin-server krb5-user libkrb5-dev faketime >/dev/null 2>&1 || true
fi
if command -v krb5-config >/dev/null && ! .venv/bin/python -c "import gssapi" 2>/dev/null; then
    echo "compiling gssapi (a minute the first time)" >&2
    .venv/bin/pip install --quiet --disable-pip-version-check --no-compile "gssapi>=1.8,<2" || true
fi
command -v krb5kdc >/dev/null && .venv/bin/python -c "import gssapi" 2>/dev/null ||
    echo "no KDC or no gssapi: the tests of Kerberos are skipped" >&2
