"""deploy/ against published schemas and by linters, which `make check-deploy` installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deploy_files import COMPOSE, DEPLOY, DOCKERFILE, MANIFESTS, documents, pods, ray_cluster

from eagleray.serve import build_app_from_args

pytestmark = pytest.mark.deploy

BIN = Path(sys.executable).parent
CRDS = os.environ.get("KUBERAY_CRDS")
"""Directory `helm-chart/kuberay-operator/crds` of a checkout of KubeRay: no package has these schemas."""

KUBERAY = [pytest.param(found, id=path.stem) for path in MANIFESTS for found in documents(path) if ray_cluster(found)]


def run(*command: str) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_passes_hadolint():
    run("hadolint", str(DOCKERFILE))


def test_compose_files_fit_the_compose_specification():
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *map(str, COMPOSE))


def test_core_resources_and_pods_of_kuberay_fit_the_schemas_of_kubernetes(tmp_path):
    core = [found for path in MANIFESTS for found in documents(path) if not ray_cluster(found)]
    for parameter in KUBERAY:
        for pod in pods(parameter.values[0]):
            core.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(core))
    run("kubernetes-validate", "--strict", str(file))


def test_rayservice_application_can_be_built():
    (service,) = documents(DEPLOY / "kuberay" / "rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert build_app_from_args(application["args"])


@pytest.fixture(scope="module")
def schemas():
    """Schemas of the kinds of resources, by kind."""
    found = {}
    for path in Path(CRDS).glob("*.yaml"):
        definition = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]
        schema = definition["versions"][0]["schema"]["openAPIV3Schema"]
        refuse_unknown_fields(schema)
        found[definition["names"]["kind"]] = schema | {"properties": schema["properties"] | {"metadata": {}}}
    return found


@pytest.mark.skipif(CRDS is None, reason="KUBERAY_CRDS names no directory of schemas")
@pytest.mark.parametrize("document", KUBERAY)
def test_kuberay_resources_fit_the_schemas_of_the_operator(document, schemas):
    from jsonschema import Draft7Validator

    found = Draft7Validator(schemas[document["kind"]]).iter_errors(document)
    errors = [f"{list(error.path)}: {error.message}" for error in found]
    assert not errors, "\n".join(errors)


def refuse_unknown_fields(schema) -> None:
    """Refuse fields that a schema does not name: the API server drops them without an error."""
    if isinstance(schema, dict):
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("type", None)
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for value in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        refuse_unknown_fields(value)
