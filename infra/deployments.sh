#!/bin/sh
# Validate the deployment files of infra/ with schemas and linters that need no network. Missing tools are skipped, with a
# message.
set -u
cd "$(dirname "$0")/.."
status=0

.venv/bin/hadolint infra/image/Containerfile || status=1
said="$(.venv/bin/check-jsonschema --builtin-schema vendor.compose-spec infra/compose/compose.yaml)" ||
    { echo "$said" >&2; status=1; }
.venv/bin/kubernetes-validate --strict --quiet infra/kubernetes/account.yaml infra/kubernetes/executors.yaml \
    infra/kubernetes/metrics.yaml infra/kubernetes/namespace.yaml infra/kubernetes/network.yaml infra/kubernetes/spark/*.yaml || status=1
if [ -x .venv/bin/promtool ]; then  # installed by infra/prometheus.sh
    .venv/bin/promtool check rules infra/prometheus/alerts.yaml >/dev/null || status=1
else
    echo "no promtool: alert rules are not checked" >&2
fi
# DAGSTER_CHART is a folder or an archive of Dagster's chart, or its address. Helm checks the values by the chart's schema.
if command -v helm >/dev/null && [ -n "${DAGSTER_CHART:-}" ]; then
    made="$(mktemp)"
    helm template sluice "$DAGSTER_CHART" --namespace sluice -f infra/kubernetes/values.yaml >"$made" &&
        .venv/bin/kubernetes-validate --strict --quiet "$made" || status=1
    rm "$made"
else
    echo "no helm, or no DAGSTER_CHART: the chart's output is not checked" >&2
fi
if command -v actionlint >/dev/null; then
    actionlint .github/workflows/*.yml || status=1
else
    .venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml >/dev/null || status=1
fi
if command -v systemd-analyze >/dev/null; then
    # Replace the commands by existing ones: /opt/sluice may be missing.
    units="$(mktemp -d)"
    for command in python dagster-webserver dagster-daemon sluice; do
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
