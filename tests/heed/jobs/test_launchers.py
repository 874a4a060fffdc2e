"""What `heed submit` renders for Slurm, Kubernetes and SkyPilot, and what it says to their commands.

Programs in a folder of the test's own stand in for those commands, and record how they are called. test_slurm.py has a
real Slurm.
"""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from heed.cli import main
from heed.jobs.job_file import load_job
from heed.jobs.launchers.kubernetes import Kubernetes
from heed.jobs.launchers.launcher import Launch, Machines
from heed.jobs.launchers.sky import Sky

ROOT = Path(__file__).parents[3]
DEBUG = str(ROOT / "configs" / "jobs" / "debug.toml")
TOOLS = {
    "sbatch": 'echo "77;cluster"',
    "kubectl": """
case "$1 $2" in
    "create -f") echo rayjob.ray.io/heed-debug-x7k2p ;;
    "exec -i") mkdir -p volume; tar --extract --directory=volume ;;
    "get rayjob") cat rayjob.json ;;
    "logs job/heed-debug-x7k2p") echo "pretrain: done in" ;;
esac""",
    "sky": """
printenv RAY_AUTH_TOKEN HF_TOKEN >> seen
case "$1" in
    launch) echo "Job submitted, ID: 4" ;;
    logs)
        code=$(cat status)
        [[ $2 == --status ]] && exit "$code"
        echo "pretrain: done in"
        [[ $code == 101 ]] || exit "$code" ;;
esac""",
}
OPTIONS = {
    "slurm": ["--slurm"],
    "kubernetes": ["--kubernetes", "--image", "registry.example.com/heed:1", "--volume", "heed-runs"],
    "sky": ["--sky", "--gpu", "h100", "--image", "registry.example.com/heed:1", "--volume", "heed-runs"],
}
FILES = {"slurm": "heed.sbatch", "kubernetes": "rayjob.yaml", "sky": "sky.yaml"}
IDS = {"slurm": "slurm:77", "kubernetes": "kubernetes:heed-debug-x7k2p", "sky": "sky:heed-debug/4"}
TWO_GPU_NODES = ["--workers", "2", "--gpus-per-node", "1"]

Heed = Callable[..., tuple[int, str]]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, in which `calls` has a line for each call of a command."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in TOOLS.items():
        path = programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "calls").touch()
    return tmp_path


@pytest.fixture
def heed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Heed:
    """Runs `heed` in this process; returns its exit code and all that it prints."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["heed", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.err + said.out

    return call


def submit(heed: Heed, folder: Path, kind: str, *arguments: str) -> tuple[int, str]:
    words = ["--runs", str(folder / "runs"), "--out", str(folder / "out"), *OPTIONS[kind], "--no-follow"]
    return heed("submit", DEBUG, *words, *(arguments or TWO_GPU_NODES))


@pytest.mark.parametrize("kind", [*OPTIONS])
def test_a_job_is_rendered_and_submitted(heed: Heed, tools: Path, kind: str) -> None:
    code, said = submit(heed, tools, kind)
    assert code == 0, said
    assert said.splitlines()[-1] == IDS[kind]
    rendered = (tools / "out" / FILES[kind]).read_text()
    assert re.search(r"python -m heed run debug.toml --runs \S+/runs", rendered)
    (payload,) = (tools / "out").glob("payload-*")
    assert payload.stat().st_mode & 0o777 == 0o700
    assert (payload / "debug.toml").stat().st_mode & 0o777 == 0o600
    assert (payload / "heed" / "cli.py").is_file()
    # The same job again is the same file, and the same copy of the code.
    assert submit(heed, tools, kind)[0] == 0
    assert (tools / "out" / FILES[kind]).read_text() == rendered
    assert [*(tools / "out").glob("payload-*")] == [payload]


@pytest.mark.parametrize("kind", [*OPTIONS])
def test_a_dry_run_renders_and_calls_nothing(heed: Heed, tools: Path, kind: str) -> None:
    code, said = submit(heed, tools, kind, *TWO_GPU_NODES, "--dry-run")
    assert code == 0
    path = tools / "out" / FILES[kind]
    assert path.is_file()
    assert "bytes in all" in said
    assert f"rendered: {path}\nthe same command without --dry-run submits it, edited or not" in said
    assert (tools / "calls").read_text() == ""


@pytest.mark.parametrize("kind", [*OPTIONS])
def test_no_secret_leaves_the_environment(heed: Heed, tools: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "planted-5e0c1a"
    for name in ("RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "HEED_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, secret)
    code, said = submit(heed, tools, kind)
    assert code == 0, said
    assert secret not in said
    assert secret not in (tools / "calls").read_text()
    files = [path for path in (tools / "out").rglob("*") if path.is_file()]
    assert len(files) > 100
    assert [path for path in files if secret in path.read_text(errors="replace")] == []
    if kind == "sky":  # the names are on the command line, the values in the environment alone
        assert "--secret RAY_AUTH_TOKEN --secret HF_TOKEN --secret WANDB_API_KEY" in (tools / "calls").read_text()
        token, key = (tools / "seen").read_text().splitlines()
        assert token != secret
        assert key == secret
        rendered = yaml.safe_load((tools / "out" / "sky.yaml").read_text())
        assert rendered["secrets"] == {"RAY_AUTH_TOKEN": None, "HF_TOKEN": None, "WANDB_API_KEY": None}


def test_each_launch_in_a_cloud_gets_a_token_of_its_own(
    heed: Heed, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-another-cluster")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for _ in range(2):
        submit(heed, tools, "sky")
    first, second = (tools / "seen").read_text().split()
    assert len(first) == len(second) == 64
    assert first != second
    assert first not in (tools / "calls").read_text()


@pytest.mark.parametrize("kind", [*OPTIONS])
def test_an_edited_file_is_submitted_as_it_is(heed: Heed, tools: Path, kind: str) -> None:
    submit(heed, tools, kind, *TWO_GPU_NODES, "--dry-run")
    path = tools / "out" / FILES[kind]
    edited = path.read_text() + "# mine\n"
    path.write_text(edited)
    code, said = submit(heed, tools, kind)
    assert code == 0, said
    assert f"edited, so used as it is: {path} (remove it to render it again)\n" in said
    assert path.read_text() == edited
    if kind == "kubernetes":  # only this takes the code to where the file expects it
        assert (tools / "volume" / "heed" / "cli.py").is_file()
    assert FILES[kind] in (tools / "calls").read_text().splitlines()[-1]


def test_an_edited_file_of_another_job_is_refused(heed: Heed, tools: Path) -> None:
    submit(heed, tools, "slurm", *TWO_GPU_NODES, "--dry-run")
    path = tools / "out" / "heed.sbatch"
    edited = path.read_text() + "# mine\n"
    path.write_text(edited)
    code, said = submit(heed, tools, "slurm", *TWO_GPU_NODES, "--set", "pretrain.num_steps=7")
    assert code == 2
    assert said.strip() == (
        f"error: {path} was edited, and the job, its code or an option has changed since it was rendered; undo that"
        " change, or remove the file to have it rendered again"
    )
    assert path.read_text() == edited
    assert len([*path.parent.glob("payload-*")]) == 1
    assert (tools / "calls").read_text() == ""
    path.unlink()
    assert submit(heed, tools, "slurm")[0] == 0


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("slurm", ["--workers", "2", "--gpus-per-node", "1", "--nodes", "1"],
         "the job has 2 ranks with one GPU each, but 1 nodes with 1 GPUs each have only 1; 2 nodes are needed"),
        ("slurm", ["--sky"], "--slurm --sky: one of them was expected"),
        ("slurm", ["--image", "x"],
         "--image and --volume are for --kubernetes and --sky; Slurm uses this environment and --runs"),
        ("slurm", ["--gpus-per-node", "0", "--nodes", "3"],
         "--nodes 3: with up to 1 ranks each, 1 machines hold the job's 1 ranks; expected --nodes 1"),
        ("slurm", ["--runs", '/ru"ns'],
         '--runs /ru"ns: Slurm reads " in options; expected a folder without it'),
        ("slurm", ["--gpus-per-node", "0", "--gpu", "h100"],
         "--gpu 'h100': the job's ranks run on CPUs; expected --gpus-per-node above 0 and cluster.use_gpus = true"),
        ("sky", ["--gpu", ""], "--gpu is missing; --sky expects the kind of GPU, such as h100"),
        ("sky", [*TWO_GPU_NODES, "--volume", ""],
         "--volume is missing; a job on 2 nodes expects a SkyPilot volume that all nodes mount at --runs"
         " (`sky volumes apply`)"),
        ("kubernetes", ["--volume", ""],
         "--volume is missing; --kubernetes expects a ReadWriteMany PersistentVolumeClaim, which all pods mount at"
         " --runs"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(heed: Heed, tools: Path, kind: str, arguments: list[str], expected: str) -> None:
    code, said = submit(heed, tools, kind, *arguments)
    assert code == 2
    assert " ".join(said.split()) == f"error: {expected}"
    assert (tools / "calls").read_text() == ""
    assert not (tools / "out").exists()


def test_a_dry_run_does_not_need_the_runs_folder_here(heed: Heed, tools: Path) -> None:
    """Slurm does: a job is submitted on a machine that has the folder."""
    arguments = ("--runs", str(tools / "elsewhere"), "--gpus-per-node", "0")
    code, said = submit(heed, tools, "slurm", *arguments, "--dry-run")
    assert code == 0, said
    assert "elsewhere" in (tools / "out" / FILES["slurm"]).read_text()
    code, said = submit(heed, tools, "slurm", *arguments)
    assert code == 2
    assert "no such folder here; expected one that all of Slurm's nodes share" in " ".join(said.split())
    assert (tools / "calls").read_text() == ""


def test_options_for_machines_need_a_system_that_starts_them(heed: Heed) -> None:
    code, said = heed("submit", DEBUG, "--runs", "/runs", "--nodes", "2", "--gpus-per-node", "4", "--out", "x")
    assert code == 2
    assert said.strip() == (
        "error: --nodes, --gpus-per-node, --out: expected only with --slurm, --kubernetes or --sky, which start"
        " machines"
    )


@pytest.mark.parametrize(
    ("kind", "tool", "where"),
    [
        ("slurm", "sbatch", "a machine of the Slurm cluster, such as its login node"),
        ("kubernetes", "kubectl", "a machine with kubectl, whose context is the cluster and namespace"),
        ("sky", "sky", "a machine with SkyPilot (pip install skypilot)"),
    ],
)
def test_a_missing_command_is_named(
    heed: Heed, tools: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tool: str, where: str
) -> None:
    others = tools / "others"
    others.mkdir()
    (others / "git").symlink_to(str(shutil.which("git")))
    monkeypatch.setenv("PATH", str(others))
    code, said = submit(heed, tools, kind)
    assert code == 2
    assert " ".join(said.splitlines()[-1].split()) == f"error: no {tool} on the PATH; expected {where}"


def test_ranks_fill_one_machine_after_another() -> None:
    job = load_job(Path(DEBUG), ["workers=2"], opens_models=False)
    assert Machines.of(job, 0, 8) == Machines(1, 2, 8)
    assert Machines.of(job, 0, 1, "h100") == Machines(2, 1, 4, "h100")
    assert Machines.of(job, 2, 1) == Machines(2, 1, 4)
    assert Machines.of(job, 2, 0) == Machines(2, 0, 1)
    three_teams_of_four = job.model_copy(update={"workers": 12})
    assert Machines.of(three_teams_of_four, 0, 8) == Machines(2, 8, 32)
    on_cpus = load_job(Path(DEBUG), ["workers=2", "cluster.use_gpus=false"], opens_models=False)
    assert Machines.of(on_cpus, 0, 8) == Machines(1, 0, 2)
    said = "--nodes 5: with up to 2 ranks each, 3 machines hold the job's 6 ranks; expected --nodes 3"
    with pytest.raises(ValueError, match=f"^{said}$"):
        Machines.of(on_cpus.model_copy(update={"workers": 6}), 5, 0)
    with pytest.raises(ValueError, match=f"^{said} or fewer --gpus-per-node$"):
        Machines.of(job.model_copy(update={"workers": 6}), 5, 2)


# Kubernetes


def closed(**fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": fields, "additionalProperties": False}


# The fields that Heed uses of KubeRay's RayJob and of a pod, written by hand from KubeRay's and Kubernetes' API
# reference: field names, types and enumerations. HEED_RAYJOB_CRD may name a file with KubeRay's own definition
# (helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml in its repository), against which the next test checks.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
POD = closed(
    spec=closed(
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
        containers={
            "type": "array",
            "minItems": 1,
            "items": closed(
                name={"type": "string"},
                image={"type": "string"},
                envFrom={
                    "type": "array",
                    "items": closed(secretRef=closed(name={"type": "string"}, optional={"type": "boolean"})),
                },
                env={"type": "array", "items": closed(name={"type": "string"}, value={"type": "string"})},
                ports={"type": "array", "items": closed(containerPort={"type": "integer"}, name={"type": "string"})},
                resources=closed(limits=TEXTS, requests=TEXTS),
                volumeMounts={
                    "type": "array", "items": closed(mountPath={"type": "string"}, name={"type": "string"})
                },
            ),
        },
        volumes={
            "type": "array",
            "items": closed(name={"type": "string"}, persistentVolumeClaim=closed(claimName={"type": "string"})),
        },
    )
)  # fmt: skip
RAY_JOB = closed(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=closed(generateName={"type": "string", "pattern": "^[a-z0-9-]{1,42}$"}, annotations=TEXTS),
    spec=closed(
        entrypoint={"type": "string"},
        runtimeEnvYAML={"type": "string"},
        backoffLimit={"type": "integer"},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished={"type": "integer"},
        submitterPodTemplate=POD,
        rayClusterSpec=closed(
            rayVersion={"type": "string"},
            authOptions=closed(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=closed(rayStartParams=TEXTS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    groupName={"type": "string"}, replicas={"type": "integer"}, minReplicas={"type": "integer"},
                    maxReplicas={"type": "integer"}, rayStartParams=TEXTS, template=POD,
                ),
            },
        ),
    ),
)  # fmt: skip


@pytest.fixture
def ray_job(heed: Heed, tools: Path) -> Any:
    assert submit(heed, tools, "kubernetes")[0] == 0
    return yaml.safe_load((tools / "out" / "rayjob.yaml").read_text())


def test_the_ray_job_has_the_fields_that_kuberay_knows(ray_job: Any, tools: Path) -> None:
    jsonschema.validate(ray_job, RAY_JOB)
    cluster = ray_job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 2)
    assert ray_job["spec"]["backoffLimit"] == 0  # a failed run is not repeated
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "1"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    pods = [ray_job["spec"]["submitterPodTemplate"], cluster["headGroupSpec"]["template"], workers["template"]]
    for pod in pods:  # all see the runs, and the code in them
        (mounted,) = pod["spec"]["containers"]
        assert mounted["volumeMounts"] == [{"mountPath": str(tools / "runs"), "name": "runs"}]
        assert pod["spec"]["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "heed-runs"}}]
    environment = yaml.safe_load(ray_job["spec"]["runtimeEnvYAML"])
    (payload,) = (tools / "out").glob("payload-*")
    assert environment["working_dir"] == str(tools / "runs" / "debug" / "launch" / payload.name)
    assert [*environment["env_vars"]] == ["HEED_CODE_VERSION"]


def test_a_wrong_field_of_the_ray_job_would_be_found(ray_job: Any) -> None:
    ray_job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["numReplicas"] = 2
    with pytest.raises(jsonschema.ValidationError, match="numReplicas"):
        jsonschema.validate(ray_job, RAY_JOB)


@pytest.mark.skipif("HEED_RAYJOB_CRD" not in os.environ, reason="HEED_RAYJOB_CRD names no copy of KubeRay's CRD")
def test_the_ray_job_is_valid_under_kuberays_own_definition(ray_job: Any) -> None:
    definition = yaml.safe_load(Path(os.environ["HEED_RAYJOB_CRD"]).read_text())
    (schema,) = (item["schema"] for item in definition["spec"]["versions"] if item["name"] == "v1")
    schema = without_unknown_fields(schema["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, of which a CRD says nothing
    jsonschema.validate(ray_job, schema)


def without_unknown_fields(schema: Any) -> Any:
    """A copy of a schema that refuses fields it does not name, which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [without_unknown_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: without_unknown_fields(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        copy.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return copy


def test_a_claim_may_have_any_name(heed: Heed, tools: Path) -> None:
    for kind in ("kubernetes", "sky"):
        assert submit(heed, tools, kind, *TWO_GPU_NODES, "--volume", "1234", "--dry-run")[0] == 0
    rendered = yaml.safe_load((tools / "out" / "rayjob.yaml").read_text())
    jsonschema.validate(rendered, RAY_JOB)
    assert yaml.safe_load((tools / "out" / "sky.yaml").read_text())["volumes"] == {str(tools / "runs"): "1234"}


def test_the_pod_that_copies_has_what_a_person_wrote_for_the_head(heed: Heed, tools: Path) -> None:
    assert submit(heed, tools, "kubernetes", *TWO_GPU_NODES, "--dry-run")[0] == 0
    file = tools / "out" / "rayjob.yaml"
    head, rest = file.read_text().split("          containers:\n            - name: ray-head")
    login = "          imagePullSecrets: [{name: registry-login}]\n"
    file.write_text(f"{head}{login}          containers:\n            - name: ray-head{rest}")
    assert submit(heed, tools, "kubernetes")[0] == 0
    (run,) = [line for line in (tools / "calls").read_text().splitlines() if line.startswith("kubectl run ")]
    assert '"imagePullSecrets": [{"name": "registry-login"}]' in run


def test_vllm_of_this_clone_is_not_sent(heed: Heed, tools: Path) -> None:
    code, said = submit(heed, tools, "slurm", *TWO_GPU_NODES, "--set", "ppo.sampler.kind=vllm")
    assert code == 2
    assert "ppo.sampler.python is empty; the Python with vLLM on the cluster's machines" in " ".join(said.split())


def test_the_code_is_copied_to_the_volume(heed: Heed, tools: Path) -> None:
    assert submit(heed, tools, "kubernetes")[0] == 0
    assert (tools / "volume" / "debug.toml").is_file()
    assert (tools / "volume" / "heed" / "cli.py").is_file()
    text = (tools / "calls").read_text()
    (pod,) = set(re.findall(r"heed-debug-copy-[0-9a-f]{6}", text))  # of this submission alone
    assert [" ".join(line.split()[:3]) for line in text.splitlines()] == [
        f"kubectl run {pod}", "kubectl wait --for=condition=Ready", f"kubectl exec {pod}",
        "kubectl exec -i", "kubectl delete pod", "kubectl create -f",
    ]  # fmt: skip
    assert f"kubectl exec -i {pod} -- tar --extract --no-same-owner " in text


def test_a_pod_of_another_submission_is_left_alone(heed: Heed, tools: Path) -> None:
    (tools / "bin" / "kubectl").write_text(f'#!/bin/sh\necho "$1" >> {tools}/calls\necho "exists" >&2\nexit 1\n')
    assert submit(heed, tools, "kubernetes")[0] == 2
    assert (tools / "calls").read_text() == "run\n"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, ("PENDING", 0)),
        ({"jobDeploymentStatus": "Initializing"}, ("PENDING", 0)),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, ("RUNNING", 0)),
        ({"jobDeploymentStatus": "Retrying"}, ("PENDING", 0)),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, ("SUCCEEDED", 0)),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "FAILED"}, ("FAILED", 1)),
        ({"jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "exit 1"}, ("FAILED", 1)),
        ({"jobDeploymentStatus": "Suspended"}, ("STOPPED", 1)),
    ],
)
def test_the_states_of_a_ray_job(tools: Path, status: dict[str, str], expected: tuple[str, int]) -> None:
    shown = {
        "metadata": {"creationTimestamp": "2026-11-27T03:00:00Z", "annotations": {"heed/results": "/runs/debug"}},
        "spec": {"entrypoint": "python -m heed run debug.toml"},
        "status": status,
    }
    (tools / "rayjob.json").write_text(json.dumps(shown))
    job = Kubernetes().find(IDS["kubernetes"])
    assert (job.status, job.exit_code) == expected
    assert job.labels == {"results": "/runs/debug"}
    assert job.submitted_at == 1795748400


def test_a_stopped_ray_job_has_no_end_to_count_to(heed: Heed, tools: Path) -> None:
    shown = {
        "metadata": {"creationTimestamp": "2026-11-27T03:00:00Z"},
        "spec": {"entrypoint": "python -m heed run debug.toml"},
        "status": {"jobDeploymentStatus": "Suspended"},
    }
    (tools / "rayjob.json").write_text(json.dumps(shown))
    code, said = heed("jobs", "status", IDS["kubernetes"])
    assert code == 0
    assert re.search(r"^took +unknown *$", said, re.MULTILINE)


# SkyPilot


@pytest.mark.parametrize(("code", "status"), [(0, "SUCCEEDED"), (100, "FAILED"), (101, "RUNNING"), (103, "STOPPED")])
def test_the_states_of_a_job_of_skypilot(tools: Path, code: int, status: str) -> None:
    (tools / "status").write_text(str(code))
    assert Sky().find("sky:heed-debug/4").status == status
    assert (tools / "calls").read_text() == "sky logs --status heed-debug 4\n"
    assert Sky().logs("sky:heed-debug/4") == "pretrain: done in\n"


@pytest.mark.parametrize(
    ("machines", "expected"),
    [(Machines(1, 1, 4, "h100"), "H100:1"), (Machines(1, 3, 12, "h100"), "H100:4"),
     (Machines(1, 6, 24, "h100"), "H100:8"), (Machines(2, 8, 32, "h100"), "H100:8")],
)  # fmt: skip
def test_clouds_are_asked_for_machines_that_they_have(machines: Machines, expected: str) -> None:
    here = Path("/x")
    launch = Launch("debug", machines, "true", here, here, here, "unknown", image="heed:1", volume="runs")
    assert yaml.safe_load(Sky().render(launch))["resources"]["accelerators"] == expected


@pytest.mark.skipif(not shutil.which("sky"), reason="SkyPilot is not installed")
def test_skypilot_reads_the_task(heed: Heed, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit(heed, tools, "sky")[0] == 0
    monkeypatch.setenv("PATH", os.environ["PATH"].partition(os.pathsep)[2])  # the real one
    monkeypatch.setenv("HOME", str(tools))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    python = Path(str(shutil.which("sky"))).resolve().parent / "python"
    program = (
        "import sky; task = sky.Task.from_yaml('out/sky.yaml');"
        "print(task.name, task.num_nodes, [*task.resources][0].accelerators)"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["heed-debug 2 {'H100': 1}"], done.stderr


# Slurm


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say_of_rendered_scripts(heed: Heed, tools: Path) -> None:
    for kind in ("slurm", "sky"):
        assert submit(heed, tools, kind)[0] == 0
    task = yaml.safe_load((tools / "out" / "sky.yaml").read_text())
    (tools / "out" / "sky.sh").write_text("#!/usr/bin/env bash\n" + task["run"])
    for name in ("heed.sbatch", "sky.sh"):
        checked = subprocess.run(["shellcheck", tools / "out" / name], capture_output=True, text=True, check=False)
        assert checked.stdout == ""


def test_the_slurm_script_is_sized_by_the_job(heed: Heed, tools: Path) -> None:
    submit(heed, tools, "slurm", *TWO_GPU_NODES, "--gpu", "h100")
    options = set(re.findall(r"^#SBATCH (\S+)$", (tools / "out" / "heed.sbatch").read_text(), re.MULTILINE))
    assert options >= {
        "--nodes=2", "--gpus-per-node=h100:1", "--cpus-per-task=4", "--mem=0", "--requeue",
        "--signal=B:USR1@300", "--open-mode=append", "--export=HOME,USER,PATH,LANG,LD_LIBRARY_PATH",
    }  # fmt: skip


# The script calls these in place of Slurm, Ray and Heed. `python` answers how many machines Ray has from the third time
# on, unless the head is dead; as `heed run` it works until it is interrupted, or ends as the test says.
PROGRAMS = {
    "srun": """while [[ $1 == --* ]]; do shift; done; exec "$@" """,
    "scontrol": """[[ $1 != show ]] || printf '%s\n' node1 node2""",
    "scancel": "",
    "hostname": "echo 10.0.0.1 172.17.0.1",
    "ray": """
if [[ $1 == get-auth-token ]]; then
    mkdir -p ~/.ray; echo secret > ~/.ray/auth_token; chmod 644 ~/.ray/auth_token; exit
fi
if [[ $2 == --head ]]; then last=${!#}; mkdir -p "${last#--temp-dir=}"; fi
exec sleep-truly 60 > /dev/null 2>&1""",
    "sleep": "exec sleep-truly 0.02",
    "python": """
if [[ $1 == -c && $2 == *execvp* ]]; then shift 2; exec env --default-signal=INT "$@"; fi
if [[ $1 == -c ]]; then
    [[ -n ${DEAD-} || $(grep -c "^python -c" "$CALLS") -lt 3 ]] && exit 1
    echo 2; exit
fi
trap 'echo "heed: interrupted" >> "$CALLS"; exit 130' INT
echo "key: ${MY_KEY-}" >> "$CALLS"
[[ -z ${ENDS-} ]] || exit "$ENDS"
while true; do sleep-truly 0.05; done""",
}


@pytest.fixture
def slurm(heed: Heed, tools: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Starts the rendered script with programs that record their calls; returns it and the records."""
    assert submit(heed, tools, "slurm")[0] == 0
    programs, calls = tools / "slurm-bin", tools / "slurm-calls"
    programs.mkdir()
    calls.touch()
    for name, body in PROGRAMS.items():
        path = programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$CALLS"\n{body}\n')
        path.chmod(0o755)
    (programs / "sleep-truly").symlink_to(str(shutil.which("sleep")))
    text = (tools / "out" / "heed.sbatch").read_text()
    script = tools / "script"
    script.write_text(text.replace(f"PATH={Path(sys.executable).parent}:", f"PATH={programs}:"))
    assert script.read_text() != text
    job_id = str(10**7 + os.getpid())  # names the folder of Ray's files in /tmp
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tools), "CALLS": str(calls), "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "4",
    }  # fmt: skip
    started = []

    def start(**more: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            ["bash", script], env={**environment, **more}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process, calls

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not Path(f"/tmp/ray-{job_id}").exists(), "the script leaves Ray's files"


StartSlurm = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.mark.parametrize("code", [0, 3])
def test_the_slurm_job_ends_as_the_run_ends(slurm: StartSlurm, tools: Path, code: int) -> None:
    process, calls = slurm(ENDS=str(code))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    made = calls.read_text().splitlines()
    run = f"python -m heed run debug.toml --runs {tools / 'runs'} --submission slurm-"
    assert any(call.startswith(run) for call in made)
    (head,) = (call for call in made if call.startswith("ray start --head"))
    assert "--node-ip-address=10.0.0.1 " in head
    assert any(re.match(r"ray start --block .*--address=10\.0\.0\.1:\d+ ", call) for call in made)
    assert (tools / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert not any(call.startswith(("scontrol requeue", "scancel")) for call in made)


@pytest.mark.parametrize(
    ("number", "last", "says"),
    [
        (signal.SIGUSR1, r"scontrol requeue \d+", "submitted again, to resume from the newest checkpoint"),
        (signal.SIGUSR2, r"scancel \d+", ""),
    ],
)
def test_a_run_saves_before_the_slurm_job_is_requeued_or_stopped(
    slurm: StartSlurm, number: int, last: str, says: str
) -> None:
    process, calls = slurm()
    end = time.monotonic() + 60
    while "key: " not in calls.read_text():
        assert time.monotonic() < end, calls.read_text()
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert says in said
    made = [call for call in calls.read_text().splitlines() if not call.startswith(("sleep", "rm"))]
    assert made.index("heed: interrupted") < len(made) - 2
    assert re.fullmatch(r"srun --ntasks=2 --ntasks-per-node=1 rm -rf /tmp/ray-\d+", made[-2])
    assert re.fullmatch(last, made[-1])


def test_a_head_that_does_not_come_up_ends_the_slurm_job(slurm: StartSlurm) -> None:
    process, calls = slurm(DEAD="yes")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Ray's head on node1 (10.0.0.1) has 0 of 2 machines after 60 tries\n" in said
    assert "heed run" not in calls.read_text()


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_keys_are_read_from_a_file_that_others_cannot_read(slurm: StartSlurm, tools: Path, mode: int) -> None:
    keys = tools / ".heed" / "keys.env"
    keys.parent.mkdir()
    keys.write_text("MY_KEY=from-the-file\n")
    keys.chmod(mode)
    process, calls = slurm(ENDS="0")
    said, _ = process.communicate(timeout=60)
    assert stat.S_IMODE(keys.stat().st_mode) == mode
    if mode == 0o600:
        assert process.returncode == 0, said
        assert "key: from-the-file" in calls.read_text()
    else:
        assert process.returncode == 2
        assert said == f"{keys} has mode 640: others could read your keys; expected 600: chmod 600 {keys}\n"
