"""Renders the part of kustomize that deploy/kubernetes uses, so that the checks need no kubectl.

If kubectl is installed, a test compares this renderer with it. Names of generated config maps carry
no hash here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

KNOWN = {
    *("apiVersion", "kind", "namespace", "resources", "configMapGenerator", "replicas", "images"),
    *("patches", "components"),
}


def render(folder: Path) -> list[Resource]:
    """The resources of a kustomization. Raises ValueError on a field that it does not render."""
    spec = _read(folder)
    resources = [item for entry in spec["resources"] for item in _load(folder / entry)]
    for entry in spec.get("components", ()):
        resources = _transformed(resources, _read(folder / entry))
    resources = _transformed(resources, spec)
    for resource in resources:
        if resource["kind"] == "RoleBinding":
            for subject in resource["subjects"]:
                subject["namespace"] = spec["namespace"]
        if resource["kind"] == "Namespace":
            resource["metadata"]["name"] = spec["namespace"]
        else:
            resource["metadata"]["namespace"] = spec["namespace"]
    return resources


def _read(folder: Path) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(spec) - KNOWN:
        raise ValueError(f"{folder}: cannot render {sorted(unknown)}; known are {sorted(KNOWN)}")
    return spec


def _transformed(resources: list[Resource], spec: dict[str, Any]) -> list[Resource]:
    """Apply what a kustomization or a component changes in the resources."""
    for generator in spec.get("configMapGenerator", ()):
        _generate(resources, generator)
    for replicas in spec.get("replicas", ()):
        find(resources, kinds={"Deployment", "StatefulSet"}, name=replicas["name"])["spec"][
            "replicas"
        ] = replicas["count"]
    for container in containers(resources):
        for image in spec.get("images", ()):
            _rename_image(container, image)
    for patch in spec.get("patches", ()):
        resources = _patched(resources, patch["target"], yaml.safe_load(patch["patch"]))
    return resources


def find(resources: list[Resource], *, kinds: set[str], name: str) -> Resource:
    """The only resource of these kinds with that name. Raises LookupError if there is not exactly
    one."""
    found = [r for r in resources if r["kind"] in kinds and r["metadata"]["name"] == name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} resources are a {sorted(kinds)} named {name}, not one")
    return found[0]


def workloads(resources: list[Resource]) -> list[Resource]:
    return [r for r in resources if r["kind"] in {"Deployment", "StatefulSet"}]


def containers(resources: list[Resource]) -> Iterator[Resource]:
    for workload in workloads(resources):
        yield from workload["spec"]["template"]["spec"]["containers"]


def _load(path: Path) -> list[Resource]:
    if path.is_dir():
        return render(path)
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def _generate(resources: list[Resource], generator: dict[str, Any]) -> None:
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    if generator.get("behavior") == "merge":
        find(resources, kinds={"ConfigMap"}, name=generator["name"])["data"].update(data)
        return
    metadata = {"name": generator["name"]}
    resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _patched(resources: list[Resource], target: dict[str, str], patch: Any) -> list[Resource]:
    """Apply a JSON patch to one resource, or delete all resources that a label selects."""
    if isinstance(patch, dict):
        label, value = target["labelSelector"].split("=")
        if patch["$patch"] != "delete" or set(target) != {"labelSelector"}:
            raise ValueError(f"cannot render a patch of {target}")
        return [r for r in resources if r["metadata"].get("labels", {}).get(label) != value]
    patched = find(resources, kinds={target["kind"]}, name=target["name"])
    for operation in patch:
        _apply(patched, operation)
    return resources


def _apply(resource: Resource, operation: dict[str, Any]) -> None:
    """Apply one operation of a JSON patch (RFC 6902). Raises LookupError for a place that does not
    exist."""
    *steps, last = [
        step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]
    ]
    place: Any = resource
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if operation["op"] not in ("add", "replace", "test"):
        raise ValueError(f"cannot render {operation['op']}")
    if isinstance(place, list) and operation["op"] == "add":
        place.insert(len(place) if last == "-" else int(last), operation["value"])
        return
    key = int(last) if isinstance(place, list) else last
    if operation["op"] == "test":
        if place[key] != operation["value"]:
            raise LookupError(f"{operation['path']} is {place[key]!r}")
        return
    if operation["op"] == "replace":
        place[key]  # raises an error if it is missing
    place[key] = operation["value"]


def _rename_image(container: Resource, image: dict[str, str]) -> None:
    name, _, tag = container["image"].rpartition(":")
    if name == image["name"]:
        container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
