#!/bin/sh
# Print the first Python 3.11 to 3.13 that can make virtual environments; PYTHON=/path/to/python names another one.
set -eu

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
    if fits "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    echo "no Python 3.11 to 3.13: install it, or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
# Debian has a separate package for venv.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >&2
    else
        echo "$python cannot make virtual environments: install $package" >&2
        exit 1
    fi
fi
echo "$python"
