"""The files of deploy/kubernetes: their fields, and that they agree with the image and with attar."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from attar.cli.main import app
from attar.server.http.security import KEY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = yaml.safe_load((Path(__file__).parent / "schemas.yaml").read_text())
FOUND = {
    each["kind"]: each
    for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for each in yaml.safe_load_all(file.read_text())
}
IMAGE = (ROOT / "Containerfile").read_text()


def check(found: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({"$defs": SCHEMAS["$defs"], **SCHEMAS[found["kind"]]}).validate(found)


def check_all(found: dict[str, Any]) -> None:
    for each in found.values():
        check(each)


def pod() -> Any:
    return FOUND["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


@pytest.mark.parametrize("kind", ["Deployment", "Service", "InferencePool"])
def test_the_fields_are_those_of_the_api(kind: str) -> None:
    check(FOUND[kind])


@pytest.mark.parametrize("change", [
    lambda found: found["InferencePool"]["spec"].update(targetPortNumber=8000),  # of releases before v1
    lambda found: found["InferencePool"]["spec"]["targetPorts"].append({"number": 8000}),
    lambda found: found["InferencePool"]["spec"]["endpointPickerRef"].pop("port"),
    lambda found: found["Deployment"]["spec"].pop("selector"),
    lambda found: found["Deployment"]["spec"]["template"]["spec"]["containers"][0].update(arg=[]),
    lambda found: found["Service"]["spec"]["ports"][0].update(port=0),
])  # fmt: skip
def test_a_wrong_field_is_seen(change: Callable[[Any], Any]) -> None:
    found = copy.deepcopy(FOUND)
    change(found)
    with pytest.raises(jsonschema.ValidationError):
        check_all(found)


def test_labels_ports_and_volumes_fit_together() -> None:
    deployment, service, pool = FOUND["Deployment"], FOUND["Service"], FOUND["InferencePool"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"] == labels
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports.keys()
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == list(ports.values())
    assert {each["name"] for each in container()["volumeMounts"]} == {each["name"] for each in pod()["volumes"]}


def test_the_pod_agrees_with_the_image() -> None:
    assert re.findall(r"^EXPOSE (\d+)$", IMAGE, re.M) == [str(container()["ports"][0]["containerPort"])]
    user = pod()["securityContext"]
    assert re.findall(r"^USER (\d+):(\d+)$", IMAGE, re.M) == [(str(user["runAsUser"]), str(user["runAsGroup"]))]
    (own,) = re.findall(r"^ENTRYPOINT (\[.*\])$", IMAGE, re.M)
    assert container()["command"][:2] == json.loads(own)[:2] == ["attar", "serve"]
    (folder,) = re.findall(r"^WORKDIR (/tmp)$", IMAGE, re.M)
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in container()["volumeMounts"]}
    assert mounts == {"/model": True, folder: False}  # all else of the image is read-only
    assert container()["securityContext"]["readOnlyRootFilesystem"]


def test_attar_takes_the_command_and_the_key() -> None:
    _, name, *words = container()["command"]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, list(words)).params
    assert (given["model"], given["host"], given["port"]) == (
        "/model",
        "0.0.0.0",
        container()["ports"][0]["containerPort"],
    )
    assert [each["name"] for each in container()["env"]] == [KEY_VARIABLE]


def test_probes_need_no_key_and_drains_have_time() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    (free,) = re.findall(r"only (.*) and the page at `/` answer without one", text)
    paths = {container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"/health", "/livez"} <= set(re.findall(r"`(/\w+)`", free))
    _, _, *words = container()["command"]
    drain = float(words[words.index("--drain-seconds") + 1])
    before = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = container()["readinessProbe"]
    assert before >= 2 * readiness["periodSeconds"] * readiness["failureThreshold"]
    assert pod()["terminationGracePeriodSeconds"] >= before + drain + 10  # seconds for the engine to end
