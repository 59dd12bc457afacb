"""Every code block of the documentation is run or checked; what cannot be, says why."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvtiers.connector.commands import check, tier_checks
from kvtiers.connector.commands.cli import COMMANDS, app, load_command
from kvtiers.tiers.config.deployment import DeploymentConfig, parse_config
from kvtiers.tiers.config.tier_options import FsTierConfig
from kvtiers.tiers.stores.files.mounts import mount_findings
from kvtiers.tiers.testing.servers import S3Server, moto_server
from kvtiers.version import built_version
from tests.connector.commands.model_configs import LLAMA_8B
from tests.docs import snippets
from tests.docs.snippets import DOCS, GUIDES, PAGES, ROOT, Snippet, commands
from tests.s3_clients import be_patient

RUN_S_MAX = 600  # ends a run that hangs
KUBERNETES = DOCS / "kubernetes.yaml"
KUBERNETES_VERSION = "1.33"
CONNECTORS = {"KVTiersConnector", "SharedStorageConnector"}

#: Programs whose commands are not run here -> why.
NOT_RUN = {
    "aws": "needs the command line of AWS and a bucket of the user's",
    "cat": "prints a file of configs/, which tests/connector/engines reads",
    "lmcache": "starts a server; tests/engines makes its adapter",
    "sglang": "starts a server; tests/engines makes its storage",
    "cd": "built into the shell",
    "chmod": "of a file that the line before made",
    "curl": "needs a running engine; make e2e asks it",
    "docker": "needs Docker's daemon; the Dockerfile and the compose file are checked below",
    "export": "built into the shell",
    "grep": "filters the output of curl",
    "journalctl": "needs systemd as PID 1; the units are verified below",
    "kubectl": "needs a cluster; the manifests are validated below",
    "mount": "needs root and a server; its options are judged below",
    "openssl": "makes a random key; tests/tiers/blocks test the format",
    "pip": "tests/test_install.py installs; here it would change the tests' environment",
    "prometheus": "tests/docs/test_monitoring.py runs it with that configuration",
    "promtool": "tests/connector/commands/test_dashboards.py runs it",
    "python": "its module is looked up below",
    "python3": "its module is looked up below",
    "rm": "removes a folder of the user's",
    "sed": "edits a file of the user's",
    "sudo": "needs other users; the command behind it runs without sudo",
    "systemctl": "needs systemd as PID 1; the units are verified below",
    "vllm": "needs vLLM and a model; make e2e runs it, and its --kv-transfer-config is checked below",
}
#: How blocks without a language begin that show something else than commands.
NO_COMMANDS = ("kvtiers/", "engine (vLLM", "tiers:")
#: Keys of YAML that is another program's -> who checks it.
OTHERS_YAML = {
    "metric_relabel_configs": "Prometheus'",
    "scrape_configs": "Prometheus'",
    "groups": "Prometheus'",
    "services": "Docker's; test_compose_file_is_consistent",
}


def shell_blocks() -> list[Snippet]:
    """Blocks in a shell's language, and blocks without a language that begin with a command."""
    plain = [each for each in snippets.of("") if not each.body.lstrip().startswith(NO_COMMANDS)]
    return [*snippets.of("sh"), *plain]


def test_every_code_block_of_guides_names_its_language() -> None:
    assert GUIDES
    assert [str(each) for each in snippets.of("", pages=GUIDES)] == []


@pytest.mark.parametrize("snippet", shell_blocks(), ids=str)
def test_every_command_of_shell_block_exists(snippet: Snippet) -> None:
    found = [command for command in commands(snippet.body) if command]
    assert found, "a block in sh, but it has no command"
    for command in found:
        check_command(command)


def check_command(command: list[str]) -> None:
    program = Path(command[0]).name
    if program == "kvtiers":
        check_kvtiers(command[1:])
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in command[1:] if "=" not in word} <= targets
    else:
        assert program in NOT_RUN, f"{program}: run it, or say in NOT_RUN why not"
    if program in ("python", "python3") and command[1] == "-m":
        module = ROOT / command[2].replace(".", "/")
        assert command[2] == "pytest" or module.with_suffix(".py").exists() or module.is_dir(), command[2]
    if program == "sudo" or "exec" in command:
        inner = next(place for place, word in enumerate(command) if Path(word).name == "kvtiers")
        check_kvtiers(command[inner + 1 :])
    if "--kv-transfer-config" in command:
        value = command[command.index("--kv-transfer-config") + 1]
        if value != "X":  # the output of kvtiers vllm-config
            check_transfer_config(json.loads(value))


def check_kvtiers(words: list[str]) -> None:
    """The command exists, and takes these options and arguments."""
    name, *arguments = words
    if name.startswith("--"):
        return
    assert name in COMMANDS, f"kvtiers has no command {name}"
    load_command(name).make_context(name, list(arguments))


def check_transfer_config(config: Mapping[str, Any]) -> None:
    """vLLM's option names one of our connectors, and its inline deployment is valid."""
    assert config["kv_connector"] in CONNECTORS
    assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")
    extra = config.get("kv_connector_extra_config", {})
    if "tiers" in extra:
        parse_config({"region": {"size": extra["cpu_bytes_to_use"]}, "tiers": extra["tiers"]})
    if "tier" in extra:
        parse_config({"region": {"size": "1GiB"}, "tiers": [extra["tier"]]})


def test_every_code_block_has_a_checked_language() -> None:
    languages = {each.language for page in PAGES for each in snippets.snippets(page)}
    assert languages <= {"", "ini", "json", "python", "sh", "text", "yaml"}, "a language that no test here looks at"


@pytest.mark.parametrize("snippet", snippets.of("python"), ids=str)
def test_python_block_compiles(snippet: Snippet) -> None:
    """It compiles. test_writing_a_store.py runs the store."""
    compile(snippet.body, str(snippet), "exec")


@pytest.mark.parametrize("snippet", snippets.of("json"), ids=str)
def test_json_block_parses_and_transfer_config_is_valid(snippet: Snippet) -> None:
    decoder, rest = json.JSONDecoder(), snippet.body.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()
        if "kv_connector" in value:
            check_transfer_config(value)


@pytest.mark.parametrize("snippet", snippets.of("yaml"), ids=str)
def test_yaml_block_is_a_valid_config_or_manifest(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIERS_KEYS", "00" * 32)
    for document in yaml.safe_load_all(snippet.body):
        if snippet.title.startswith("in the "):
            check_kubernetes(in_place(snippet.title, document))
        elif isinstance(document, dict) and "apiVersion" in document:
            check_kubernetes(document)
        elif isinstance(document, dict) and OTHERS_YAML.keys() & document.keys():
            continue
        else:
            check_deployment(document, tmp_path)


def check_deployment(document: Any, folder: Path) -> None:
    """A deployment, or a part of one: a list of tiers, or some of its keys."""
    parts = {"tiers": document} if isinstance(document, list) else document
    assert parts.keys() <= DeploymentConfig.model_fields.keys()
    key_file = folder / "keys"
    key_file.write_text("00" * 32 + "\n")
    key_file.chmod(0o600)
    for tier in parts.get("tiers", []):
        if "keys_file" in tier:
            tier["keys_file"] = str(key_file)
    parse_config({"region": {"size": "1GiB"}, "tiers": [{"type": "memory"}]} | parts, registered=())


def in_place(title: str, part: Any) -> dict[str, Any]:
    """A part of a manifest, where its comment says that it belongs, in the manifest of the guide."""
    manifests = yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8"))
    manifest: dict[str, Any] = next(each for each in manifests if each["kind"] == "Deployment")
    pod = manifest["spec"]["template"]["spec"]
    if title == "in the container":
        pod["containers"][0] |= part
    elif title == "in the pod's volumes":
        pod["volumes"] += part
    elif title.startswith("in the StatefulSet's spec"):
        pod["volumes"] = [each for each in pod["volumes"] if each["name"] != "cache"]
        manifest["kind"] = "StatefulSet"
        del manifest["spec"]["strategy"]  # a StatefulSet ends a pod before its successor starts in any case
        manifest["spec"] |= {"serviceName": "llm", **part}
        assert {each["metadata"]["name"] for each in part["volumeClaimTemplates"]} == {"cache"}
    else:
        raise AssertionError(f"{title}: no such place")
    return manifest


def check_kubernetes(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_kubernetes_manifest_is_consistent() -> None:
    manifests = list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))
    config, deployment, service = manifests
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    parsed = parse_config(yaml.safe_load(config["data"]["kvtiers.yaml"]))
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    shm, cache = mounts["/dev/shm"]["emptyDir"], mounts["/var/cache/kvtiers"]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert quantity(shm["sizeLimit"]) > parsed.region.size
    assert quantity(container["resources"]["limits"]["memory"]) > quantity(shm["sizeLimit"])
    disk = parsed.tiers[0]
    assert isinstance(disk, FsTierConfig)
    assert disk.root_dir.startswith("/var/cache/kvtiers")
    assert disk.max_bytes is not None
    assert disk.max_bytes < quantity(cache["sizeLimit"])
    assert quantity(cache["sizeLimit"]) < quantity(container["resources"]["limits"]["ephemeral-storage"])
    assert all(each["secret"]["defaultMode"] == 0o400 for each in spec["volumes"] if "secret" in each)
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["KVTIERS_CONFIG"] == "/etc/kvtiers/kvtiers.yaml"
    check_transfer_config(json.loads(container["args"][-1]))
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    # A Service's variables in other pods must not look like vLLM's: VLLM_PORT=tcp://… ends vLLM.
    assert not service["metadata"]["name"].startswith("vllm")
    assert spec["enableServiceLinks"] is False
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert variables["HF_HOME"] in mounts
    ports = {each["containerPort"] for each in container["ports"]}
    assert ports == {8000, parsed.metrics.port}
    assert "prometheus.io/port" not in deployment["spec"]["template"]["metadata"]["annotations"]  # it would hide one
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    for manifest in manifests:
        check_kubernetes(manifest)


def quantity(text: str) -> int:
    """Bytes of a Kubernetes quantity."""
    return int(text.removesuffix("Gi")) << 30


def test_compose_file_is_consistent() -> None:
    compose = yaml.safe_load((DOCS / "two-replicas.compose.yaml").read_text(encoding="utf-8"))
    gpus = []
    for replica in ("replica-a", "replica-b"):
        service = compose["services"][replica]
        (gpu,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus += gpu["device_ids"]
        (command,) = service["command"]
        config = json.loads(command[command.index("{") : command.rindex("}") + 1])
        check_transfer_config(config)
        size = parse_size(config["kv_connector_extra_config"]["cpu_bytes_to_use"])
        assert size < int(service["shm_size"].removesuffix("gb")) << 30
        assert (DOCS / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert len(set(gpus)) == len(gpus) == 2
    images = [service["image"] for service in compose["services"].values() if "build" not in service]
    assert images
    assert not [image for image in images if image.endswith(":latest") or ":" not in image]


def parse_size(text: str) -> int:
    return parse_config({"region": {"size": text}, "tiers": [{"type": "memory"}]}).region.size


def test_dockerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: make setup")
    done = subprocess.run([hadolint, "--no-color", DOCS / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_docker_build_context_makes_a_wheel(tmp_path: Path) -> None:
    """With what Dockerfile.dockerignore lets through, and nothing else."""
    lines = (DOCS / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    context = tmp_path / "src"
    context.mkdir()
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists() or not name.startswith(".git/"):  # a worktree has these files elsewhere
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, context / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path, context],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
        env={name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("kvtiers-*.whl")
    assert wheel.name.split("-")[1] == built_version(context)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_units_pass_verification(tmp_path: Path) -> None:
    units = {Path(each.title).name: each.body.replace("\\\n", " ") for each in snippets.of("ini")}
    assert {"vllm.service", "kvtiers-gc.service", "kvtiers-gc.timer"} <= units.keys()
    for name, body in units.items():
        for command in re.findall(r"^ExecStart=(.*)$", body, re.MULTILINE):
            check_command(next(commands(command)))
        # systemd-analyze wants the programs to exist.
        (tmp_path / name).write_text(re.sub(r"/opt/vllm/bin/\w+", "/bin/true", body))
    # It reads the runtime of a user's systemd, which a container may lack.
    environment = os.environ | {"SYSTEMD_LOG_LEVEL": "warning", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if str(tmp_path) in line] == []


def test_nfs_mount_command_has_no_bad_options(tmp_path: Path) -> None:
    script = "".join(each.body for each in snippets.of("sh", pages=[DOCS / "guides" / "nfs.md"]))
    ((*_, options, _, point),) = (words for words in commands(script) if words[:4] == ["mount", "-t", "nfs", "-o"])
    table = tmp_path / "mountinfo"
    table.write_text(f"36 35 0:40 / {point} rw - nfs4 server:/export rw,{options}\n")
    assert mount_findings(f"{point}/kvtiers", mountinfo=str(table)) == []
    table.write_text(table.read_text().replace(",lookupcache=pos", ""))
    assert mount_findings(f"{point}/kvtiers", mountinfo=str(table))  # the table is read at all


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide_commands_run(page: Path, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, on the page's own files, with folders and buckets put in the place of theirs."""
    monkeypatch.setattr(check, "TIERS_S_MAX", 300.0)  # a busy machine may take longer to import a driver
    be_patient(monkeypatch)
    monkeypatch.setattr(tier_checks, "missing_mount", lambda _: "")  # the folders of this test are on no NFS mount
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    local = "/etc/kvtiers.yaml"
    files = {each.title.partition(",")[0]: each.body for each in snippets.of("yaml", pages=[page])}
    if local not in files:
        files[local] = next(each.body for each in snippets.of("yaml", pages=[DOCS / "guides" / "local-disk.md"]))
    configs = {"MODEL": tmp_path / "config.json"}
    configs["MODEL"].write_text(json.dumps(LLAMA_8B))
    for place, (name, body) in enumerate(files.items()):
        document = yaml.safe_load(body) if name.endswith(".yaml") else None
        if document and "tiers" in document:
            configs[name] = tmp_path / f"{place}.yaml"
            configs[name].write_text(yaml.safe_dump(moved(document, tmp_path / str(place), s3)))
    ran = 0
    for block in snippets.of("sh", pages=[page]):
        for command in commands(block.body):
            if command[0] == "sudo":
                command = command[command.index("/opt/vllm/bin/kvtiers") :]
            if Path(command[0]).name == "kvtiers":
                done = CliRunner().invoke(app, [str(configs.get(word, word)) for word in command[1:]])
                assert done.exit_code == 0, f"{command}: {done.output}"
                ran += 1
    if not ran:
        pytest.skip("this page has no command that runs here: its commands are for containers")


def moved(document: dict[str, Any], folder: Path, s3: S3Server) -> dict[str, Any]:
    """A deployment with its folders below ``folder``, and its buckets on a server of the test."""
    document["region"]["size"] = "16MiB"
    for tier in document["tiers"]:
        if "root_dir" in tier:
            tier["root_dir"] = str(folder / tier["type"])
            tier["min_free"] = 1
            Path(tier["root_dir"]).mkdir(parents=True, exist_ok=True)
        if tier["type"] == "s3":
            tier["endpoint_url"] = s3.endpoint_url
            tier.pop("ca_bundle", None)
            s3.client().create_bucket(Bucket=tier["bucket"])
    return document


def test_every_page_is_in_site_navigation() -> None:
    """By name: PyYAML does not know the tags in mkdocs.yml."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\nplugins:")[0]
    listed = set(re.findall(r"[\w/.-]+\.md", navigation))
    assert {str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents} <= listed
