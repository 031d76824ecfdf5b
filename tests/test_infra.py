"""What infra/ holds for a deployment: its values agree with the code and with each other.

Schemas and linters are run by `make check` (infra/deployments.sh).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.assets.internals import LOCATION, MODULE
from sluice.cli import metrics

ROOT = Path(__file__).parents[1]
INFRA = ROOT / "infra"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = (INFRA / "image/Containerfile").read_text()
COMPOSE = yaml.safe_load((INFRA / "compose/compose.yaml").read_text())
MANIFESTS = [m for p in sorted((INFRA / "kubernetes").glob("*.yaml")) for m in yaml.safe_load_all(p.read_text())]
UNITS = {p.stem.removeprefix("sluice-"): p.read_text() for p in (INFRA / "systemd").glob("*.service")}
DEPLOYED = [p for p in INFRA.rglob("*") if p.is_file() and p.parent != INFRA and "__pycache__" not in p.parts]
LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"


def pods() -> dict[str, dict[str, Any]]:
    of = (m for m in MANIFESTS if m["kind"] == "Deployment")
    return {m["metadata"]["name"].removeprefix("sluice-"): m["spec"]["template"]["spec"] for m in of}


def commands(where: str) -> dict[str, str]:
    """The command line of each process: code, web, daemon, metrics."""
    if where == "systemd":
        lines = {name: re.search(r"^ExecStart=/opt/sluice/bin/(.*)$", unit, re.M) for name, unit in UNITS.items()}
        return {name: line[1] for name, line in lines.items() if line}
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
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert all("User=sluice\n" in unit and "NoNewPrivileges=yes\n" in unit for unit in UNITS.values())


def test_one_version_everywhere() -> None:
    named = {path.name: set(re.findall(r"\bsluice[:-](\d+\.\d+\.\d+)", path.read_text())) for path in DEPLOYED}
    assert set().union(*named.values()) == {PROJECT["version"]}
    kustomization = yaml.safe_load((INFRA / "kustomization.yaml").read_text())
    assert [i["newTag"] for i in kustomization["images"]] == [PROJECT["version"]]


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
