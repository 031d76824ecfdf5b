"""What infra/ holds for a deployment: its values agree with the code and with each other.

Schemas and linters are run by `make check` (infra/deployments.sh).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from sluice import __version__
from sluice.assets.instance.internals import LOCATION, MODULE
from sluice.cli.inspect import metrics
from tests import deployment
from tests.deployment import INFRA, UNITS

ROOT = INFRA.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = (INFRA / "image/Containerfile").read_text()
COMPOSE = yaml.safe_load((INFRA / "compose/compose.yaml").read_text())
MANIFESTS = [m for p in sorted((INFRA / "kubernetes").glob("*.yaml")) for m in yaml.safe_load_all(p.read_text())]
DEPLOYED = [p for p in INFRA.rglob("*") if p.is_file() and p.parent != INFRA and "__pycache__" not in p.parts]
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


def pods() -> dict[str, dict[str, Any]]:
    of = (m for m in MANIFESTS if m["kind"] == "Deployment")
    return {m["metadata"]["name"].removeprefix("sluice-"): m["spec"]["template"]["spec"] for m in of}


def commands(where: str) -> dict[str, str]:
    """The command line of each process: code, web, daemon, metrics."""
    if where == "systemd":
        return {name: deployment.command(name) for name in UNITS}
    if where == "kubernetes":
        found = {name: " ".join(pod["containers"][0]["command"]) for name, pod in pods().items()}
        return {name: line.removeprefix("tini -- ") for name, line in found.items()}
    return {name: " ".join(s["command"]) for name, s in COMPOSE["services"].items() if name in UNITS}


@pytest.mark.parametrize("where", ["compose", "kubernetes", "systemd"])
def test_processes_are_the_same_everywhere(where: str) -> None:
    host = LOOPBACK if where == "systemd" else EVERYWHERE
    serving = "" if where == "systemd" else f" --host {host}"
    assert commands(where) == {
        "code": f"dagster code-server start -m {MODULE} -h {host} -p {code_port()} --location-name {LOCATION}",
        "web": f"dagster-webserver -w /srv/dagster/workspace.yaml -h {host} -p 3000",
        "daemon": "dagster-daemon run -w /srv/dagster/workspace.yaml",
        "metrics": f"sluice metrics --serve{serving} --port {metrics.PORT}",
    }


def server() -> dict[str, Any]:
    (entry,) = yaml.safe_load((INFRA / "workspace.yaml").read_text())["load_from"]
    return dict(entry["grpc_server"])


def code_port() -> int:
    return int(server()["port"])


def test_the_workspace_is_read_by_dagster(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._core.workspace.load import location_origins_from_yaml_paths

    monkeypatch.setenv("SLUICE_CODE_HOST", "code.example")
    (origin,) = location_origins_from_yaml_paths([str(INFRA / "workspace.yaml")])
    assert (origin.host, origin.port, origin.location_name) == ("code.example", 4000, LOCATION)


def test_the_code_server_is_where_the_others_look_for_it() -> None:
    services = {m["metadata"]["name"]: m for m in MANIFESTS if m["kind"] == "Service"}
    for name, pod in pods().items():
        (host,) = [e["value"] for e in pod["containers"][0]["env"] if e["name"] == "SLUICE_CODE_HOST"]
        assert services[host]["spec"]["ports"][0]["port"] == code_port(), name
    assert COMPOSE["services"]["web"]["environment"]["SLUICE_CODE_HOST"] in COMPOSE["services"]
    assert all("SLUICE_CODE_HOST=127.0.0.1 " in unit for unit in UNITS.values())


def test_services_and_probes_name_the_ports_that_processes_listen_on() -> None:
    ports = {"code": code_port(), "web": 3000, "metrics": metrics.PORT}
    for m in (m for m in MANIFESTS if m["kind"] == "Service"):
        name = m["metadata"]["name"].removeprefix("sluice-")
        assert [p["port"] for p in m["spec"]["ports"]] == [ports[name]]
        assert m["spec"]["selector"] == {"app.kubernetes.io/name": m["metadata"]["name"]}
    for name, pod in pods().items():
        container = pod["containers"][0]
        assert [p["containerPort"] for p in container.get("ports", [])] == ([ports[name]] if name in ports else [])
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] == ports[name]
    for policy in (m for m in MANIFESTS if m["kind"] == "NetworkPolicy"):
        name = policy["metadata"]["name"].removeprefix("sluice-")
        found = [p["port"] for rule in policy["spec"].get("ingress", []) for p in rule.get("ports", [])]
        assert found == ([ports[name]] if name in ports else [])
    scrape = yaml.safe_load((INFRA / "prometheus/scrape.yaml").read_text())
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == [f"{metrics.HOST}:{metrics.PORT}"]


def test_what_listens_on_this_host_does_so_on_loopback() -> None:
    published = [port for s in COMPOSE["services"].values() for port in s.get("ports", [])]
    assert published == ["127.0.0.1:3000:3000", f"127.0.0.1:{metrics.PORT}:{metrics.PORT}"]


def test_nobody_is_root_and_nothing_more_is_allowed_than_needed() -> None:
    user = re.findall(r"^USER (\d+):(\d+)$", IMAGE, re.M)[-1]
    assert f"--gid {user[1]} " in IMAGE
    assert f"--uid {user[0]} " in IMAGE
    for pod in pods().values():
        who = pod["securityContext"]
        assert (str(who["runAsUser"]), str(who["runAsGroup"]), who["runAsNonRoot"]) == (*user, True)
        for container in (*pod["containers"], *pod["initContainers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
    for name, service in COMPOSE["services"].items():
        if name != "postgres":
            assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        if "SLUICE_IMAGE" in service["image"]:
            assert service["read_only"]
    assert all("User=sluice\n" in unit and "NoNewPrivileges=yes\n" in unit for unit in UNITS.values())


def test_one_version_everywhere() -> None:
    named = {path.name: set(re.findall(r"\bsluice[:-](\d+\.\d+\.\d+)", path.read_text())) for path in DEPLOYED}
    assert set().union(*named.values()) == {__version__}
    kustomization = yaml.safe_load((INFRA / "kustomization.yaml").read_text())
    assert [i["newTag"] for i in kustomization["images"]] == [__version__]


def test_kustomize_takes_every_manifest() -> None:
    kustomization = yaml.safe_load((INFRA / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == sorted(
        f"kubernetes/{p.name}" for p in (INFRA / "kubernetes").glob("*.yaml")
    )


def pins(path: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """By package, the version and the hashes; without extras and markers."""
    found = {}
    for block in re.split(r"\n(?=[a-z0-9])", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)):
        if named := re.match(r"([a-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)", block):
            found[named[1]] = named[2], frozenset(re.findall(r"sha256:[0-9a-f]{64}", block))
    return found


def test_the_image_is_locked_as_the_checkout_is() -> None:
    whole, image = pins(ROOT / "requirements.lock"), pins(INFRA / "image/requirements.lock")
    assert {name: whole.get(name) for name in image} == image
    assert all(hashes for _, hashes in image.values())
    assert {"dagster", "dagster-webserver", "dagster-postgres", "pyspark", "boto3", "prometheus-client"} <= image.keys()
    assert not {"pytest", "mypy", "moto"} & image.keys()
    extras = re.search(r"^IMAGE := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert extras
    assert {*extras[1].split()} < {*PROJECT["optional-dependencies"]}


def values_of_secrets() -> Iterator[str]:
    for line in (INFRA / "compose/secrets.env.example").read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.partition("=")[0]


def test_dagster_takes_the_database_from_the_secrets() -> None:
    said = yaml.safe_load((INFRA / "dagster.yaml").read_text())
    assert said["storage"]["postgres"]["postgres_url"]["env"] in set(values_of_secrets())


def test_brokers_on_this_host_know_each_other_and_are_where_the_secrets_say() -> None:
    brokers = {name: s for name, s in COMPOSE["services"].items() if name.startswith("kafka-")}
    said = {name: s["environment"] for name, s in brokers.items()}
    assert {f"User:CN={name}" for name in said} < {*said["kafka-1"]["KAFKA_SUPER_USERS"].split(";")}
    for name, own in said.items():
        number = name.removeprefix("kafka-")
        assert (str(own["KAFKA_NODE_ID"]), own["KAFKA_ADVERTISED_LISTENERS"]) == (number, f"CLIENTS://{name}:9093")
        assert own["KAFKA_SSL_KEYSTORE_LOCATION"] == f"/etc/kafka/secrets/{name}.pem"
        assert f"{number}@{name}:9094" in own["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
        assert f"{name}:/var/lib/kafka/data" in brokers[name]["volumes"]
    example = (INFRA / "compose/secrets.env.example").read_text()
    assert f"KAFKA_BOOTSTRAP={','.join(f'{name}:9093' for name in brokers)}\n" in example
    from sluice.resources.local.local_kafka import VERSION

    assert {s["image"] for s in brokers.values()} == {f"apache/kafka:{VERSION}"}


def test_spark_on_this_host_is_where_the_page_says() -> None:
    master = COMPOSE["services"]["spark-master"]["command"]
    address = f"spark://spark-master:{master[master.index('--port') + 1]}"
    assert COMPOSE["services"]["spark-worker"]["command"][-1] == address
    assert address in (INFRA / "compose/README.md").read_text()


@pytest.mark.parametrize("readme", sorted(INFRA.rglob("README.md")), ids=lambda p: p.parent.name)
def test_a_readme_is_one_screen(readme: Path) -> None:
    lines = readme.read_text().splitlines()
    assert len(lines) <= 45
    for path in re.findall(r"\(((?:\.\./)+[^)#]*)", "\n".join(lines)):
        assert (readme.parent / path).exists(), path
    for path in re.findall(r"\b(infra/[\w./-]+\.\w+)", "\n".join(lines)):
        assert (ROOT / path).exists(), path


# -- a pod for each run

POD_PER_RUN = INFRA / "kubernetes/pod-per-run"
RUNS = yaml.safe_load((POD_PER_RUN / "dagster.yaml").read_text())


def test_a_pod_for_each_run_changes_the_launcher_alone() -> None:
    assert (POD_PER_RUN / "dagster.yaml").read_text().startswith((INFRA / "dagster.yaml").read_text())
    assert {*RUNS} - {*yaml.safe_load((INFRA / "dagster.yaml").read_text())} == {"run_launcher"}
    component = yaml.safe_load((POD_PER_RUN / "kustomization.yaml").read_text())
    made = {g["name"]: g.get("options", {}) for g in component["configMapGenerator"]}
    assert made[RUNS["run_launcher"]["config"]["instance_config_map"]] == {"disableNameSuffixHash": True}
    others = {"kustomization.yaml", "dagster.yaml"}
    assert {*component["resources"]} == {p.name for p in POD_PER_RUN.glob("*.yaml")} - others


def job_of_a_run() -> dict[str, Any]:
    """What Dagster's launcher asks Kubernetes for, by that configuration."""
    from dagster import DagsterRun
    from dagster._config import process_config
    from dagster_k8s import K8sRunLauncher
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import construct_dagster_k8s_job
    from kubernetes.client import ApiClient

    said = process_config(K8sRunLauncher.config_type(), RUNS["run_launcher"]["config"])
    assert said.success, said.errors
    assert said.value
    with patch("dagster_k8s.launcher.load_kubernetes_config"):  # there is no cluster
        launcher = K8sRunLauncher(**said.value)
    context = K8sContainerContext.create_for_run(DagsterRun("land_orders"), launcher, include_run_tags=False)
    config = context.get_k8s_job_config(job_image="registry.example/sluice:1", run_launcher=launcher)
    job = construct_dagster_k8s_job(config, ["dagster"], "run-1", context.run_k8s_config, component="run_worker")
    return dict(ApiClient().sanitize_for_serialization(job))


def test_the_pod_of_a_run_is_as_the_code_servers() -> None:
    import kubernetes_validate

    job = job_of_a_run()
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    run, code = job["spec"]["template"]["spec"], pods()["code"]
    assert run["securityContext"] == code["securityContext"]
    assert run["serviceAccountName"] == code["serviceAccountName"]
    assert run["terminationGracePeriodSeconds"] == code["terminationGracePeriodSeconds"]
    (worker,), (server,) = run["containers"], code["containers"]
    assert worker["securityContext"] == server["securityContext"] | {"readOnlyRootFilesystem": False}
    places = {m["mountPath"] for m in worker["volumeMounts"]}
    assert places == {m["mountPath"] for m in server["volumeMounts"]} - {
        "/srv/dagster/workspace.yaml",
        "/var/cache/sluice",
    }
    assert worker["envFrom"][-1] == server["envFrom"][0]
    names = {e["name"] for e in worker["env"]}
    assert {e["name"] for e in server["env"]} - names == {"SLUICE_CODE_HOST"}


def test_the_policies_of_the_base_reach_runs() -> None:
    (policy,) = yaml.safe_load_all((POD_PER_RUN / "network.yaml").read_text())
    labels = job_of_a_run()["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
