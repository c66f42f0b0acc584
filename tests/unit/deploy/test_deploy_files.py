"""deploy/: each port, path, option and variable that its files name exists, and the files agree with each other."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from deploy_files import (
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    MANIFESTS,
    ROOT,
    build_arguments,
    documents,
    image_environment,
    instructions,
    load,
    pods,
    ray_cluster,
)
from ray._private import ray_constants

import eagleray
from eagleray.cli.commands import make_parser
from eagleray.config.build import field_owners
from eagleray.config.option_variables import NO_OPTIONS
from eagleray.serve import build_app_from_args
from eagleray.serve.defaults import GRACEFUL_SHUTDOWN_SECONDS
from eagleray.serve.options import serve_config
from eagleray.server.status import StatusRoutes

DOCUMENTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}") for path in MANIFESTS for document in documents(path)
]
WITH_PODS = [parameter for parameter in DOCUMENTS if list(pods(parameter.values[0]))]
COMPOSED = load(COMPOSE[0])["services"]
OPEN_ROUTES = {endpoint.path for endpoint in StatusRoutes(None).endpoints() if endpoint.is_open}
RAY_PORTS = {
    "gcs-server": ray_constants.DEFAULT_PORT,
    "dashboard": ray_constants.DEFAULT_DASHBOARD_PORT,
    "client": 10001,
    "serve": 8000,
}
STAGES = {found.stage for found in instructions()}


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def parse_command(words: list[str]):
    """Parse a command line of eagleray, which raises `UserError` for an option that does not exist."""
    return make_parser([words[0]]).parse(words)


def assert_variables_are_options(names) -> None:
    for name in names:
        if name.startswith("EAGLERAY_"):
            assert name in NO_OPTIONS or name.removeprefix("EAGLERAY_").lower() in field_owners(), name


# Kubernetes and KubeRay.


@pytest.mark.parametrize("document", WITH_PODS)
def test_pod_is_unprivileged_and_has_resources_image_and_probe(document):
    for pod in pods(document):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            assert container["image"] == f"eagleray:{eagleray.__version__}"
            requests, limits = (container["resources"][kind] for kind in ("requests", "limits"))
            assert requests == limits and requests.keys() == {"cpu", "memory"}
            assert container["livenessProbe"]


@pytest.mark.parametrize("document", WITH_PODS)
def test_pod_names_variables_volumes_and_ports_that_exist(document):
    for pod in pods(document):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert_variables_are_options(entry["name"] for entry in container["env"])
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            for port in container.get("ports", []):
                expected = (
                    int(image_environment()["EAGLERAY_PORT"]) if port["name"] == "http" else RAY_PORTS[port["name"]]
                )
                assert port["containerPort"] == expected


@pytest.mark.parametrize("document", [found for found in WITH_PODS if ray_cluster(found.values[0])])
def test_ray_cluster_has_the_images_version_of_ray_and_probes_its_agent(document):
    cluster = ray_cluster(document)
    assert cluster["rayVersion"] == build_arguments()["RAY_VERSION"]
    assert cluster["authOptions"] == {"mode": "token"}
    agent = Path(ray_constants.__file__).parents[1] / "dashboard/modules/reporter/healthz_agent.py"
    for pod in pods(document):
        probe = pod["containers"][0]["livenessProbe"]["httpGet"]
        assert probe["port"] == ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
        assert f'"{probe["path"]}"' in agent.read_text()


def test_deployment_probes_routes_that_need_no_key():
    deployment, service, budget = documents(DEPLOY / "kubernetes" / "eagleray.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready",
        "readiness": "/ready",
        "liveness": "/live",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN_ROUTES
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == budget["spec"]["selector"]["matchLabels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_deployment_drains_before_it_is_killed():
    pod = documents(DEPLOY / "kubernetes" / "eagleray.yaml")[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parse_command(container["args"])
    waited = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= waited + float(options.shutdown_timeout) + 10


def test_rayjob_entrypoint_is_a_command_of_eagleray():
    job, claim = documents(DEPLOY / "kuberay" / "rayjob.yaml")
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "eagleray"
    options = parse_command(words)
    head, *_ = pods(job)
    mounts = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    assert {Path(file).parent for file in (options.input_file, options.output_file)} == {Path(mounts["data"])}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in head["volumes"]
    groups = ray_cluster(job)["workerGroupSpecs"]
    assert int(options.data_parallel_size) == sum(group["replicas"] for group in groups)
    assert options.ray_engine_placement == "spread", "a node has room for several engines on CPUs"


def test_rayservice_names_a_builder_and_options_that_exist():
    (service,) = documents(DEPLOY / "kuberay" / "rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == f"eagleray.serve:{build_app_from_args.__name__}"
    options = dict(application["args"])
    deployment = options.pop("deployment")
    assert serve_config(options).model.model == options["model"]
    groups = ray_cluster(service)["workerGroupSpecs"]
    assert deployment == {"num_replicas": sum(group["replicas"] for group in groups), "max_replicas_per_node": 1}
    for pod in pods(service):
        assert pod["terminationGracePeriodSeconds"] >= GRACEFUL_SHUTDOWN_SECONDS + 10
        assert "serve" in {port["name"] for port in pod["containers"][0]["ports"]}


# The image.


def test_image_healthcheck_and_command_fit_the_server():
    found = {item.name: item.value for item in instructions() if item.name in ("HEALTHCHECK", "CMD", "ENTRYPOINT")}
    assert re.search(r"http://127\.0\.0\.1:\$EAGLERAY_PORT(/\w+)", found["HEALTHCHECK"])[1] in OPEN_ROUTES
    assert json.loads(found["ENTRYPOINT"])[-1] == "eagleray"
    parse_command(json.loads(found["CMD"]))
    assert_variables_are_options(image_environment())
    assert {item.value for item in instructions() if item.name == "EXPOSE"} == {image_environment()["EAGLERAY_PORT"]}


class Health(BaseHTTPRequestHandler):
    """Answers every request with the status of the server."""

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("wget") is None, reason="the health check needs wget")
@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
def test_image_healthcheck_asks_the_server_and_no_proxy(status, exit_code):
    (check,) = [item.value for item in instructions() if item.name == "HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.status, server.timeout = status, 30
        environment = {**os.environ, "EAGLERAY_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:1"}
        process = subprocess.Popen(command, env={**environment, "no_proxy": ""}, stderr=subprocess.DEVNULL)
        server.handle_request()
        assert process.wait(timeout=30) == exit_code


@pytest.mark.parametrize(("extras", "requirement"), [("serve,data", ".[serve,data]"), ("", ".")])
def test_image_build_argument_extras_may_be_empty(extras, requirement):
    installing = [item.value for item in instructions() if "pip install" in item.value and "EXTRAS" in item.value]
    assert len(installing) == 2
    for value in installing:
        words = value.partition("pip install ")[2].partition("&&")[0]
        script = f"EXTRAS={shlex.quote(extras)} RAY_VERSION=2; printf '%s\n' {words}"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [requirement, "ray==2"]


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_image_does_not_run_as_root(stage):
    last = [item for item in instructions() if item.stage == stage][-1]
    assert (last.name, last.value) == ("USER", "1000")


def test_dockerfile_names_stages_and_extras_that_exist():
    for item in instructions():
        sources = re.findall(r"(?:--from=|from=)([\w-]+)", item.value)
        assert set(sources) <= STAGES
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(build_arguments()["EXTRAS"].split(",")) <= project["optional-dependencies"].keys()


def test_dockerignore_admits_what_is_copied():
    admitted = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = [item.words[:-1] for item in instructions() if item.name == "COPY" and "--from" not in item.value]
    for source in (source for sources in copied for source in sources):
        assert source == "." or (ROOT / source).exists()
        assert source == "." or source.split("/")[0] in admitted
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {"eagleray", "bench"} <= admitted and table["where"] == [".", "bench"]


# Compose.


def test_compose_builds_a_stage_and_mounts_files_that_exist():
    build = COMPOSED["eagleray"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert {load(path)["services"]["eagleray"]["build"]["target"] for path in COMPOSE} <= STAGES
    for service in COMPOSED.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in load(COMPOSE[0])["volumes"]


def test_compose_server_drains_before_it_is_killed():
    server = COMPOSED["eagleray"]
    assert_variables_are_options(server["environment"])
    timeout = float(server["environment"]["EAGLERAY_SHUTDOWN_TIMEOUT"])
    assert seconds(server["stop_grace_period"]) >= timeout + 10


def test_compose_grafana_can_be_seen_and_not_changed():
    """Grafana's first account is admin with the password admin."""
    settings = COMPOSED["grafana"]["environment"]
    assert settings["GF_AUTH_ANONYMOUS_ENABLED"] == "true" and "GF_AUTH_ANONYMOUS_ORG_ROLE" not in settings
    assert settings["GF_AUTH_BASIC_ENABLED"] == "false" and settings["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_compose_prometheus_scrapes_the_server_and_grafana_reads_it():
    (job,) = load(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"eagleray:{image_environment()['EAGLERAY_PORT']}"]}]
    assert job.get("metrics_path", "/metrics") in OPEN_ROUTES
    (source,) = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSED
    (provider,) = load(DEPLOY / "grafana/provisioning/dashboards/eagleray.yaml")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in COMPOSED["grafana"]["volumes"])
    assert provider["options"]["path"] == str(Path(mounts["./grafana/eagleray.json"]).parent)
    assert COMPOSED["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounts.values()
