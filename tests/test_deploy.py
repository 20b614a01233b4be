"""What `deploy/` holds is valid by the schemas of those who read it, and names what exists."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_apply import plan_for
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.demo import MODEL

DEPLOY = Path(__file__).parents[1] / "deploy"
MANIFESTS = ["engine.yaml", "services.yaml", "namespace.yaml"]


def manifests():
    return [one for name in MANIFESTS for one in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())]


def option_names(command):
    """The options of a semmoe command, as `--help` of the command itself knows them."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    return {word for word in shown.split() if word.startswith("--")}


def test_the_compose_file_is_valid_by_the_compose_specification():
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*words, DEPLOY / "compose.yaml"], check=True)


def test_manifests_are_valid_by_the_schemas_of_kubernetes():
    validate = pytest.importorskip("kubernetes_validate")
    for one in manifests():
        validate.validate(one, validate.latest_version(), strict=True)
    kinds = [one["kind"] for one in manifests()]
    assert sorted(kinds) == ["Namespace", "Service", "Service", "StatefulSet"]
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(MANIFESTS)


def test_mounted_files_are_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
        build = service.get("build")
        assert build is None or (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    dashboards = yaml.safe_load((DEPLOY / "grafana" / "dashboards" / "semmoe.yml").read_text())
    path = dashboards["providers"][0]["options"]["path"]
    assert any(mount.split(":")[1] == path for mount in compose["services"]["grafana"]["volumes"])
    targets = {target.split(":")[0] for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
               for one in job["static_configs"] for target in one["targets"]}  # fmt: skip
    assert targets == {"engine"} <= compose["services"].keys()


def test_ports_are_those_of_this_host_alone():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)
    on_the_host = {name: one for name, one in compose["services"].items() if one.get("network_mode") == "host"}
    assert on_the_host.keys() == {"picker", "envoy"}
    assert "--host" not in on_the_host["picker"]["command"]  # nor does Envoy listen elsewhere: test_gateway.py


@pytest.mark.parametrize("service", ["engine", "picker"])
def test_options_of_containers_exist(service):
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][service]["command"]
    given = {str(word) for word in command if str(word).startswith("--")}
    assert given <= option_names({"engine": "serve"}.get(service, service))


def script(container):
    pod = next(one for one in manifests() if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    found = {one["name"]: one for one in pod["initContainers"] + pod["containers"]}[container]
    return found["args"][0]


@pytest.mark.parametrize("right", [True, False])
def test_a_node_with_another_plan_does_not_start(tmp_path, right):
    """The init container's script as it stands, but for where the plan and the model lie."""
    plan = plan_for(MODEL, tmp_path / "plan", ep_size=2, dp_size=2)
    command = f"cat {plan}/plan.json {plan}/plan.safetensors | sha256sum | cut -d ' ' -f 1"
    known = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    text = script("plan").replace("/plan/", f"{plan}/").replace("--plan /plan", f"--plan {plan}")
    text = text.replace("serve /model", f"serve {MODEL}").replace(
        "doctor --engine vllm", "doctor --engine transformers"
    )
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PLAN_SHA256": known if right else "0" * 64, "PATH": path, "HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-ec", text], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == right, done.stdout + done.stderr
    assert ("no problem found" if right else f"the plan of this node is {known}, not 000") in done.stdout


@pytest.mark.parametrize("index", [0, 1])
def test_each_node_serves_its_own_ranks(tmp_path, index):
    """The command of either pod, with `semmoe` as a program that says how it was called."""
    (tmp_path / "semmoe").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "semmoe").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "INDEX": str(index), "POD_IP": "10.0.0.1"}
    words = subprocess.run(["sh", "-ec", script("engine")], env=environment, capture_output=True, text=True, check=True)
    called = words.stdout.split()
    own, engine = called[: called.index("--")], called[called.index("--") + 1 :]
    assert {word for word in own if word.startswith("--")} <= option_names("serve")
    assert ("--headless" in engine) == (index == 1)
    assert ("--data-parallel-start-rank" in engine) == (index == 1)
    if index:
        assert engine[engine.index("--data-parallel-start-rank") + 1] == "8"


def test_dockerfiles_install_the_wheel_and_run_semmoe():
    for name, command in (("engine", "serve"), ("picker", "picker")):
        lines = (DEPLOY / f"{name}.Dockerfile").read_text().splitlines()
        entry = next(line for line in lines if line.startswith("ENTRYPOINT"))
        assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["semmoe", command]
        assert "COPY dist/*.whl /tmp/semmoe/" in lines
    assert shlex.split((DEPLOY / "picker.Dockerfile").read_text().split("USER ")[1].splitlines()[0]) == ["65534:65534"]
