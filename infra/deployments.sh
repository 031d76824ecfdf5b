#!/bin/sh
# Validate the deployment files of infra/ with schemas and linters that need no network. Missing tools are skipped, with a
# message.
set -u
cd "$(dirname "$0")/.."
status=0

.venv/bin/hadolint infra/image/Containerfile || status=1
said="$(.venv/bin/check-jsonschema --builtin-schema vendor.compose-spec infra/compose/compose.yaml)" ||
    { echo "$said" >&2; status=1; }
runs=infra/kubernetes/pod-per-run
.venv/bin/kubernetes-validate --strict --quiet infra/kubernetes/*.yaml infra/kubernetes/spark/*.yaml \
    "$runs/account.yaml" "$runs/network.yaml" || status=1
if [ -x .venv/bin/promtool ]; then  # installed by infra/prometheus.sh
    .venv/bin/promtool check rules infra/prometheus/alerts.yaml >/dev/null || status=1
else
    echo "no promtool: alert rules are not checked" >&2
fi
if command -v kubectl >/dev/null; then
    kubectl kustomize infra >/dev/null || status=1
    # The overlay of infra/kubernetes/README.md, with a pod for each run.
    overlay="$(mktemp -d)"
    cp -r infra "$overlay/infra"
    mkdir "$overlay/own"
    echo "topics: orders" >"$overlay/own/orders.yaml"
    sed -n '/^```yaml$/,/^```$/{/^```/d;p}' infra/kubernetes/README.md |
        sed 's#\.\./sluice/infra#../infra#; s#files: \[.*\]#files: [orders.yaml]#' >"$overlay/own/kustomization.yaml"
    kubectl kustomize "$overlay/own" >"$overlay/made.yaml" &&
        .venv/bin/kubernetes-validate --strict --quiet "$overlay/made.yaml" || status=1
    rm -r "$overlay"
else
    echo "no kubectl: the output of Kustomize is not checked" >&2
fi
if command -v systemd-analyze >/dev/null; then
    # Replace the commands by existing ones: /opt/sluice may be missing.
    units="$(mktemp -d)"
    for command in dagster dagster-webserver dagster-daemon sluice; do
        echo '#!/bin/sh' >"$units/$command"
        chmod +x "$units/$command"
    done
    for unit in infra/systemd/sluice*; do
        sed "s#/opt/sluice/bin#$units#" "$unit" >"$units/$(basename "$unit")"
    done
    # It exits 0 after warnings about unknown keys: any output is a failure.
    output="$(SYSTEMD_UNIT_PATH="$units:" systemd-analyze verify --man=no "$units"/sluice*.service "$units"/sluice.target 2>&1)" || status=1
    [ -z "$output" ] || { echo "$output" >&2; status=1; }
    for unit in "$units"/*.service; do
        systemd-analyze security --offline=true --threshold=25 "$unit" >"$units/report" 2>&1 ||
            { cat "$units/report" >&2; status=1; }
    done
    rm -r "$units"
else
    echo "no systemd-analyze: the units are not looked at" >&2
fi
exit $status
