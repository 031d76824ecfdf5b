"""The deployment files of infra/ agree with the code and with each other.

Schemas and linters are run by `make check` (infra/deployments.sh).
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from sluice import __version__
from sluice.assets.instance.instance import open_instance
from sluice.assets.instance.internals import CODE_SERVER, LOCATION, MODULE
from sluice.cli.inspect import metrics
from sluice.pipelines.errors import SetupError
from sluice.resources.project import Project
from tests import deployment
from tests.deployment import INFRA, UNITS

ROOT = INFRA.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = (INFRA / "image/Containerfile").read_text()
COMPOSE = yaml.safe_load((INFRA / "compose/compose.yaml").read_text())
VALUES = yaml.safe_load((INFRA / "kubernetes/values.yaml").read_text())
(CODE,) = VALUES["dagster-user-deployments"]["deployments"]
CODE_ACCOUNT = VALUES["dagster-user-deployments"]["serviceAccount"]["name"]
RUNS = VALUES["runLauncher"]["config"]["k8sRunLauncher"]
_FILES = sorted(p for p in (INFRA / "kubernetes").glob("*.yaml") if p.stem != "values")
MANIFESTS = [m for p in _FILES for m in yaml.safe_load_all(p.read_text())]
DEPLOYED = [p for p in INFRA.rglob("*") if p.is_file() and p.parent != INFRA and "__pycache__" not in p.parts]
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


def load_pods() -> dict[str, dict[str, Any]]:
    deployments = (m for m in MANIFESTS if m["kind"] == "Deployment")
    return {m["metadata"]["name"].removeprefix("sluice-"): m["spec"]["template"]["spec"] for m in deployments}


def list_commands(platform: str) -> dict[str, str]:
    """Returns the command line of each process: code, web, daemon, metrics."""
    if platform == "systemd":
        return {name: deployment.read_command(name) for name in UNITS}
    return {name: " ".join(s["command"]) for name, s in COMPOSE["services"].items() if name in UNITS}


@pytest.mark.parametrize("where", ["compose", "systemd"])
def test_deployments_run_the_same_processes(where: str) -> None:
    host = LOOPBACK if where == "systemd" else EVERYWHERE
    serving = "" if where == "systemd" else f" --host {host}"
    assert list_commands(where) == {
        "code": f"python -m {CODE_SERVER} -m {MODULE} -h {host} -p {get_code_port()} --location-name {LOCATION}",
        "web": f"dagster-webserver -w /srv/dagster/workspace.yaml -h {host} -p 3000",
        "daemon": "dagster-daemon run -w /srv/dagster/workspace.yaml",
        "metrics": f"sluice metrics --serve{serving} --port {metrics.PORT}",
    }


def test_unit_user_owns_the_project_and_the_dagster_home() -> None:
    """`install -d` leaves the folders above the last one to root, and the default lake is in /srv/sluice."""
    lines = (INFRA / "systemd" / "README.md").read_text().splitlines()
    (words,) = (line.split() for line in lines if "install -d " in line)
    assert words[2:6] == ["-o", "sluice", "-g", "sluice"]
    assert {"/srv/sluice", "/srv/dagster"} <= set(words)


def load_server() -> dict[str, Any]:
    (entry,) = yaml.safe_load((INFRA / "workspace.yaml").read_text())["load_from"]
    return dict(entry["grpc_server"])


def get_code_port() -> int:
    return int(load_server()["port"])


def test_dagster_reads_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.workspace.load import location_origins_from_yaml_paths

    monkeypatch.setenv("SLUICE_CODE_HOST", "code.example")
    (origin,) = location_origins_from_yaml_paths([str(INFRA / "workspace.yaml")])
    assert (origin.host, origin.port, origin.location_name) == ("code.example", 4000, LOCATION)


def test_processes_use_the_address_of_the_code_server() -> None:
    assert CODE["port"] == get_code_port()
    assert CODE["dagsterApiGrpcArgs"] == ["-m", MODULE, "--location-name", LOCATION]
    assert CODE["name"] == LOCATION, "the chart's workspace takes the name of the location from the deployment"
    assert COMPOSE["services"]["web"]["environment"]["SLUICE_CODE_HOST"] in COMPOSE["services"]
    assert all("SLUICE_CODE_HOST=127.0.0.1 " in unit for unit in UNITS.values())


def test_services_and_probes_use_the_ports_of_the_processes() -> None:
    ports = {"code": get_code_port(), "web": VALUES["dagsterWebserver"]["service"]["port"], "metrics": metrics.PORT}
    for m in (m for m in MANIFESTS if m["kind"] == "Service"):
        name = m["metadata"]["name"].removeprefix("sluice-")
        assert [p["port"] for p in m["spec"]["ports"]] == [ports[name]]
        assert m["spec"]["selector"] == {"app.kubernetes.io/name": m["metadata"]["name"]}
    for name, pod in load_pods().items():
        container = pod["containers"][0]
        assert [p["containerPort"] for p in container.get("ports", [])] == ([ports[name]] if name in ports else [])
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] == ports[name]
    for policy in (m for m in MANIFESTS if m["kind"] == "NetworkPolicy"):
        name = policy["metadata"]["name"].removeprefix("sluice-")
        ports_allowed = [p["port"] for rule in policy["spec"].get("ingress", []) for p in rule.get("ports", [])]
        assert ports_allowed == ([ports[name]] if name in ports else [])
    scrape = yaml.safe_load((INFRA / "prometheus/scrape.yaml").read_text())
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == [f"{metrics.HOST}:{metrics.PORT}"]


def test_services_on_this_host_listen_on_loopback() -> None:
    published = [port for s in COMPOSE["services"].values() for port in s.get("ports", [])]
    assert published == ["127.0.0.1:3000:3000", f"127.0.0.1:{metrics.PORT}:{metrics.PORT}"]


def test_no_process_runs_as_root_or_with_extra_privileges() -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", IMAGE, re.M)[-1]
    assert f"--gid {user[1]} " in IMAGE
    assert f"--uid {user[0]} " in IMAGE
    for pod in load_pods().values():
        context = pod["securityContext"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"]), context["runAsNonRoot"]) == (*user, True)
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
    run = RUNS["runK8sConfig"]["containerConfig"]
    for process in (
        VALUES["dagsterWebserver"],
        VALUES["dagsterDaemon"],
        CODE,
        run | {"volumeMounts": RUNS["volumeMounts"]},
    ):
        assert process["securityContext"]["readOnlyRootFilesystem"]
        assert {"/tmp", "/srv/dagster"} <= {m["mountPath"] for m in process["volumeMounts"]}
    for name, service in COMPOSE["services"].items():
        if name != "postgres":
            assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
            assert service["ulimits"] == {"core": 0}
        if "SLUICE_IMAGE" in service["image"]:
            assert service["read_only"]
    lines = ("User=sluice\n", "NoNewPrivileges=yes\n", "LimitCORE=0\n")
    assert all(line in unit for unit in UNITS.values() for line in lines)


def test_deployed_versions_match_the_package() -> None:
    versions = {path.name: set(re.findall(r"\bsluice[:-](\d+\.\d+\.\d+)", path.read_text())) for path in DEPLOYED}
    assert set().union(*versions.values()) == {__version__}
    assert {d["image"]["tag"] for d in (VALUES["dagsterWebserver"], VALUES["dagsterDaemon"], CODE)} == {__version__}


def read_pins(path: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Returns the version and the hashes by package, without extras and markers."""
    pins_by_package = {}
    for block in re.split(r"\n(?=[a-z0-9])", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)):
        if match := re.match(r"([a-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)", block):
            pins_by_package[match[1]] = match[2], frozenset(re.findall(r"sha256:[0-9a-f]{64}", block))
    return pins_by_package


def test_image_lock_matches_the_checkout_lock() -> None:
    checkout, image = read_pins(ROOT / "requirements.lock"), read_pins(INFRA / "image/requirements.lock")
    assert {name: checkout.get(name) for name in image} == image
    assert all(hashes for _, hashes in image.values())
    assert {"dagster", "dagster-webserver", "dagster-postgres", "pyspark", "boto3", "prometheus-client"} <= image.keys()
    assert not {"pytest", "mypy", "moto"} & image.keys()
    extras = re.search(r"^IMAGE := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert extras
    assert {*extras[1].split()} < {*PROJECT["optional-dependencies"]}


def test_packages_with_a_copyleft_are_those_of_the_page() -> None:
    """All packages of the image that are installed here, which those of other platforms are not."""
    copyleft = dict[str, str]()
    for name in read_pins(INFRA / "image/requirements.lock"):
        with suppress(importlib.metadata.PackageNotFoundError):
            metadata = importlib.metadata.metadata(name)
            fields = (metadata.get_all(key) or [] for key in ("License-Expression", "License", "Classifier"))
            licenses = [text for field in fields for text in field if not text.startswith(("Topic", "Intended"))]
            if kind := re.search(r"\b(A?L?GPL|General Public|MPL|Mozilla|EPL|Eclipse|CDDL)", " ".join(licenses)):
                copyleft[name] = kind[1]
    assert copyleft.keys() == {"crc32c", "psycopg2-binary", "certifi", "tqdm"}
    page = (INFRA / "image/README.md").read_text()
    assert all(f"`{name}`" in page for name in copyleft)


def list_secrets(file: str) -> Iterator[str]:
    for line in (INFRA / f"compose/{file}.env.example").read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.partition("=")[0]


def test_dagster_reads_the_database_from_the_secrets() -> None:
    instance = yaml.safe_load((INFRA / "dagster.yaml").read_text())
    assert [instance["storage"]["postgres"]["postgres_url"]["env"]] == [*list_secrets("database")]


def test_each_process_gets_only_the_secrets_that_it_needs() -> None:
    """The web server and the daemon reach the database alone; `sluice metrics` asks it for runs, and Kafka for lag."""
    needed = {name: {"database", "secrets"} for name in ("code", "metrics")} | {
        name: {"database"} for name in ("web", "daemon")
    }
    services = {name: {f.removesuffix(".env") for f in COMPOSE["services"][name]["env_file"]} for name in UNITS}
    units = {name: {*re.findall(r"^EnvironmentFile=/etc/sluice/(\w+)\.env$", u, re.M)} for name, u in UNITS.items()}
    assert services == units == needed
    feeds = [{"name": "sluice-feeds"}]
    assert (CODE["envSecrets"], RUNS["envSecrets"]) == (feeds, feeds)
    assert not any("envSecrets" in VALUES[process] for process in ("dagsterWebserver", "dagsterDaemon"))
    (metrics_container,) = load_pods()["metrics"]["containers"]
    assert metrics_container["envFrom"] == [{"secretRef": feeds[0]}]
    secret = {"name": VALUES["global"]["postgresqlSecretName"], "key": "postgresql-password"}
    assert {"name": "DAGSTER_PG_PASSWORD", "valueFrom": {"secretKeyRef": secret}} in metrics_container["env"]
    mounts = {m["mountPath"]: m for m in metrics_container["volumeMounts"]}
    assert mounts["/srv/dagster/dagster.yaml"] in CODE["volumeMounts"]


def test_each_container_mounts_only_its_own_keys_and_folders() -> None:
    """A mounted folder is readable as a whole: no container has another one's key, or feeds that it does not read."""
    mounts = {name: {v.partition(":")[0] for v in s.get("volumes", [])} for name, s in COMPOSE["services"].items()}
    keys = {name: [m for m in sources if m.startswith("./private")] for name, sources in mounts.items()}
    brokers = [name for name in mounts if name.startswith("kafka-")]
    own = {name: [f"./private/{name}"] for name in [*brokers, "admin"]}
    shared = {name: ["./private/sluice"] for name in ("code", "metrics", "spark-worker")}
    assert {name: folders for name, folders in keys.items() if folders} == own | shared
    assert [name for name, sources in mounts.items() if "${SLUICE_FEEDS" in sources] == ["code", "metrics"]
    assert mounts["web"] == mounts["daemon"] == {"../dagster.yaml", "../workspace.yaml", "dagster"}


def test_missing_database_error_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_DAGSTER_DATABASE", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    shutil.copy(INFRA / "dagster.yaml", tmp_path)
    unset = pytest.raises(SetupError, match=r"dagster\.yaml cannot be used: \$SLUICE_DAGSTER_DATABASE is not set")
    with unset, open_instance(Project(tmp_path)):
        pass


def test_invalid_dagster_settings_error_names_the_diagnostic_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text("retention: {schedule: s3same}\n")
    with pytest.raises(SetupError, match=r"its settings are invalid") as invalid, open_instance(Project(tmp_path)):
        pass
    assert invalid.value.remedy == f"DAGSTER_HOME={tmp_path} dagster instance info shows the reason"
    assert "s3same" not in str(invalid.value)


def test_broker_addresses_match_each_other_and_the_secrets() -> None:
    brokers = {name: s for name, s in COMPOSE["services"].items() if name.startswith("kafka-")}
    environments = {name: s["environment"] for name, s in brokers.items()}
    assert {f"User:CN={name}" for name in environments} < {*environments["kafka-1"]["KAFKA_SUPER_USERS"].split(";")}
    for name, environment in environments.items():
        number = name.removeprefix("kafka-")
        assert (str(environment["KAFKA_NODE_ID"]), environment["KAFKA_ADVERTISED_LISTENERS"]) == (
            number,
            f"CLIENTS://{name}:9093",
        )
        assert environment["KAFKA_SSL_KEYSTORE_LOCATION"] == f"/etc/kafka/secrets/{name}.pem"
        assert f"{number}@{name}:9094" in environment["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
        assert f"{name}:/var/lib/kafka/data" in brokers[name]["volumes"]
    example = (INFRA / "compose/secrets.env.example").read_text()
    assert f"KAFKA_BOOTSTRAP={','.join(f'{name}:9093' for name in brokers)}\n" in example
    from sluice.resources.local.local_kafka import VERSION

    assert {s["image"] for s in brokers.values()} == {f"apache/kafka:{VERSION}"}


def test_spark_address_matches_the_page() -> None:
    master = COMPOSE["services"]["spark-master"]["command"]
    address = f"spark://spark-master:{master[master.index('--port') + 1]}"
    assert COMPOSE["services"]["spark-worker"]["command"][-1] == address
    assert address in (INFRA / "compose/README.md").read_text()


@pytest.mark.parametrize("readme", sorted(INFRA.rglob("README.md")), ids=lambda p: p.parent.name)
def test_readme_fits_one_screen(readme: Path) -> None:
    lines = readme.read_text().splitlines()
    assert len(lines) <= 45
    for path in re.findall(r"\(((?:\.\./)+[^)#]*)", "\n".join(lines)):
        assert (readme.parent / path).exists(), path
    for path in re.findall(r"\b(infra/[\w./-]+\.\w+)", "\n".join(lines)):
        assert (ROOT / path).exists(), path


# -- Dagster's chart: a pod for each run


def rename_to_snake_case(values: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("([A-Z])", lambda m: f"_{m[1].lower()}", key): value for key, value in values.items()}


def configure_launcher() -> dict[str, Any]:
    """Returns the launcher's configuration, as the chart's template writes it into dagster.yaml."""
    snake = rename_to_snake_case(RUNS)
    snake["env_secrets"] = [secret["name"] for secret in snake["env_secrets"]]
    snake["run_k8s_config"] = rename_to_snake_case(snake["run_k8s_config"])
    home = VALUES["global"]["dagsterHome"]
    own = {"service_account_name": "sluice-dagster", "instance_config_map": "sluice-dagster-instance"}
    secret = VALUES["global"]["postgresqlSecretName"]
    return {**snake, **own, "postgres_password_secret": secret, "dagster_home": home, "job_namespace": "sluice"}


def build_job() -> dict[str, Any]:
    """Returns the job that Dagster's launcher creates with the chart's values."""
    from dagster import DagsterRun
    from dagster._config import process_config
    from dagster_k8s import K8sRunLauncher
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import construct_dagster_k8s_job
    from kubernetes.client import ApiClient

    config = process_config(K8sRunLauncher.config_type(), configure_launcher())
    assert config.success, config.errors
    assert config.value
    with patch("dagster_k8s.launcher.load_kubernetes_config"):  # there is no cluster
        launcher = K8sRunLauncher(**config.value)
    context = K8sContainerContext.create_for_run(DagsterRun("land_orders"), launcher, include_run_tags=False)
    image = context.get_k8s_job_config(job_image="registry.example/sluice:1", run_launcher=launcher)
    job = construct_dagster_k8s_job(image, ["dagster"], "run-1", context.run_k8s_config, component="run_worker")
    return dict(ApiClient().sanitize_for_serialization(job))


def test_run_pod_matches_the_pod_of_the_code_server() -> None:
    import kubernetes_validate

    job = build_job()
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    run = job["spec"]["template"]["spec"]
    assert run["securityContext"] == CODE["podSecurityContext"] == load_pods()["metrics"]["securityContext"]
    assert run["serviceAccountName"] == "sluice-run"
    assert CODE_ACCOUNT == load_pods()["metrics"]["serviceAccountName"] == "sluice"
    (worker,) = run["containers"]
    assert worker["securityContext"] == CODE["securityContext"]
    mount_paths = {m["mountPath"] for m in worker["volumeMounts"]}
    assert len(mount_paths) == len(worker["volumeMounts"]), "Kubernetes refuses a path that is mounted twice"
    assert mount_paths == {m["mountPath"] for m in CODE["volumeMounts"]}
    assert "/var/cache/sluice" not in mount_paths, "the image's compiled loops"
    assert worker["envFrom"] == [{"secretRef": {"name": "sluice-feeds"}}]
    assert {"SLUICE_POD_IP", "SLUICE_LOG_FORMAT", "DAGSTER_HOME"} <= {e["name"] for e in worker["env"]}


def test_the_pod_of_the_code_server_is_valid() -> None:
    """The test builds the pod from the values as the chart's template does."""
    import kubernetes_validate

    keys = ("env", "securityContext", "resources", "volumeMounts")
    container = {key: CODE[key] for key in keys} | {
        "name": "code",
        "image": "x",
        "envFrom": [{"secretRef": CODE["envSecrets"][0]}],
    }
    pod = {"securityContext": CODE["podSecurityContext"], "volumes": CODE["volumes"], "containers": [container]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "code"}, "spec": pod}
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_chart_instance_settings_match_dagster_yaml() -> None:
    """The chart appends additionalInstanceConfig to dagster.yaml, and writes the rest as in infra/dagster.yaml."""
    instance = yaml.safe_load((INFRA / "dagster.yaml").read_text())
    more = VALUES["additionalInstanceConfig"]
    assert more == {key: instance[key] for key in more}
    concurrency = {kind: rename_to_snake_case(VALUES["concurrency"][kind]) for kind in ("runs", "pools")}
    assert VALUES["concurrency"]["enabled"]
    assert concurrency == instance["concurrency"]
    # The chart's default is a queue. Without one, Dagster ignores the limits; a limit of its own conflicts with them.
    assert "runCoordinator" not in VALUES["dagsterDaemon"]
    days = {kind: VALUES["retention"][kind]["purgeAfterDays"] for kind in ("schedule", "sensor")}
    assert days == {kind: keep["purge_after_days"] for kind, keep in instance["retention"].items()}
    assert VALUES["dagsterDaemon"]["runRetries"]["maxRetries"] == instance["run_retries"]["max_retries"]


def test_web_server_probe_uses_the_port_of_the_service() -> None:
    """The chart's probe has port 80 by default, for any port of the service."""
    web = VALUES["dagsterWebserver"]
    assert web["readinessProbe"]["httpGet"]["port"] == web["service"]["port"]


def test_network_policy_selects_run_pods() -> None:
    policies = {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == "NetworkPolicy"}
    labels = build_job()["spec"]["template"]["metadata"]["labels"]
    assert policies["sluice-run"]["podSelector"]["matchLabels"].items() <= labels.items()
    ((_, run),) = (rule["from"] for rule in policies["sluice-executors"]["ingress"])
    assert run["podSelector"]["matchLabels"].items() <= labels.items()


def test_runs_have_rights_in_the_namespace_of_executors_alone() -> None:
    """No role can be limited to pods with a label: in one namespace, runs could delete the daemon."""
    roles = [m for m in MANIFESTS if m["kind"] in ("Role", "ClusterRole")]
    bindings = [m for m in MANIFESTS if m["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    namespaces = [m["metadata"]["name"] for m in MANIFESTS if m["kind"] == "Namespace"]
    assert [(m["kind"], m["metadata"]["namespace"]) for m in roles] == [("Role", "sluice-executors")]
    assert [(m["kind"], m["metadata"]["namespace"]) for m in bindings] == [("RoleBinding", "sluice-executors")]
    (subject,) = bindings[0]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "sluice-run", "namespace": "sluice"}
    assert {"sluice", "sluice-executors"} == {*namespaces}
    assert "secrets" not in roles[0]["rules"][0]["resources"]
    policy = next(m for m in MANIFESTS if m["metadata"]["name"] == "sluice-run" and m["kind"] == "NetworkPolicy")
    (source,) = policy["spec"]["ingress"][0]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "sluice-executors"}
    assert "spark.kubernetes.namespace: sluice-executors" in (ROOT / "docs/spark.md").read_text()
