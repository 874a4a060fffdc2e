"""Kubernetes: one RayJob for the KubeRay operator, which makes a Ray cluster for it and takes it down afterwards."""

import json
import secrets
import shlex
import subprocess
import tarfile
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cluster.jobs import ClusterJob, wait_until_over
from heed.jobs.launchers.launcher import Launch, ToolError, call, render

WHERE = "a machine with kubectl, whose context is the cluster and namespace"
RESULTS = "heed/results"  # annotation: the run's folder
MEMORY_GIB_PER_RANK = 32
STATES = {
    "Complete": "SUCCEEDED", "Failed": "FAILED", "ValidationFailed": "FAILED", "Suspended": "STOPPED",
    "Running": "RUNNING", "Suspending": "RUNNING",
}  # fmt: skip
SHARED_FIELDS = ("imagePullSecrets", "nodeSelector", "tolerations", "serviceAccountName", "securityContext")  # of pods
COPY_SECONDS = 600  # an image of several GB may have to be pulled first
STOP_SECONDS = 300.0


class Kubernetes:
    """Jobs of KubeRay in kubectl's current namespace. An id is "kubernetes:" and the RayJob's name.

    The volume holds the code and the runs. A pod that exists for the copy alone takes the code there, because a RayJob
    cannot contain it: Kubernetes limits an object to a megabyte.
    """

    file = "rayjob.yaml"
    address = "kubernetes"
    poll_seconds = 5.0

    def render(self, launch: Launch) -> str:
        for option, value, what in (
            ("--image", launch.image, "an image with the packages of constraints.txt (configs/cluster/Dockerfile)"),
            ("--volume", launch.volume, "a ReadWriteMany PersistentVolumeClaim, which all pods mount at --runs"),
        ):
            if not value:
                raise ValueError(f"{option} is missing; --kubernetes expects {what}")
        machines = launch.machines
        ranks = machines.gpus_per_node or machines.cpus_per_node
        resources = {"cpu": str(machines.cpus_per_node), "memory": f"{MEMORY_GIB_PER_RANK * ranks}Gi"}
        if machines.gpus_per_node:
            resources["nvidia.com/gpu"] = str(machines.gpus_per_node)
        return render(
            "rayjob.yaml.jinja",
            launch,
            target=_target(launch),
            resources=json.dumps(resources),
            ray_version=version("ray"),
            again=f"kubectl create -f {shlex.quote(str(launch.folder / self.file))}",
        )

    def submit(self, launch: Launch, path: Path) -> str:
        _copy(launch)
        # Not `apply`: a RayJob runs once, and each submission is one of its own, with a name that Kubernetes completes.
        named = call(["kubectl", "create", "-f", str(path), "-o", "name"], WHERE)
        return "kubernetes:" + named.strip().rpartition("/")[2]

    def find(self, job_id: str) -> ClusterJob:
        try:
            shown = json.loads(call(["kubectl", "get", "rayjob", _name(job_id), "-o", "json"], WHERE))
        except ToolError as error:
            if "NotFound" not in str(error):
                raise
            raise ValueError(
                f"kubectl's namespace has no RayJob {_name(job_id)!r}; `kubectl get rayjobs` lists them"
            ) from None
        status: dict[str, Any] = shown.get("status", {})
        name = STATES.get(status.get("jobDeploymentStatus", ""), "PENDING")
        if name == "SUCCEEDED" and status.get("jobStatus") in ("FAILED", "STOPPED"):
            name = str(status["jobStatus"])
        return ClusterJob(
            job_id=job_id,
            status=name,
            message=" ".join(f"{status.get('reason', '')} {status.get('message', '')}".split()),
            command=shown["spec"]["entrypoint"],
            labels={"results": shown["metadata"].get("annotations", {}).get(RESULTS, "")},
            submitted_at=_seconds(shown["metadata"]["creationTimestamp"]),
            ended_at=_seconds(status["endTime"]) if status.get("endTime") else 0.0,
            exit_code=int(name in ("FAILED", "STOPPED")),
        )

    def logs(self, job_id: str) -> str:
        """The submitter's log. It is empty until the pods are up, which may take minutes."""
        try:
            return call(["kubectl", "logs", f"job/{_name(job_id)}", "--tail=-1"], WHERE)
        except ToolError as error:
            if any(word in str(error) for word in ("NotFound", "waiting to start", "ContainerCreating", "timed out")):
                return ""
            raise

    def stop(self, job_id: str) -> ClusterJob:
        """Suspend a job: its pods end, and the object stays."""
        call(["kubectl", "patch", "rayjob", _name(job_id), "--type=merge", '--patch={"spec":{"suspend":true}}'], WHERE)
        late = (
            f"{job_id}: asked to stop, still running after {STOP_SECONDS:.0f} s; `kubectl delete rayjob"
            f" {_name(job_id)}` ends it"
        )
        return wait_until_over(self, job_id, STOP_SECONDS, late)


def _target(launch: Launch) -> Path:
    """The payload's folder on the volume."""
    return launch.run / "launch" / launch.payload.name


def _copy(launch: Launch) -> None:
    """Copy the payload to the volume, through a pod that is deleted afterwards. What a person has written into the file
    for the head, such as a login of the registry, holds for it too.
    """
    pod, target = f"heed-{launch.label}-copy-{secrets.token_hex(3)}", str(_target(launch))
    container = {
        "name": "copy",
        "image": launch.image,
        "command": ["sleep", "3600"],
        "volumeMounts": [{"mountPath": str(launch.runs), "name": "runs"}],
    }
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": launch.volume}}]
    rendered = yaml.safe_load((launch.folder / Kubernetes.file).read_text(encoding="utf-8"))
    head = rendered["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    edited = {name: head[name] for name in SHARED_FIELDS if name in head}
    spec = {"spec": {"containers": [container], "volumes": volumes, "restartPolicy": "Never", **edited}}
    run = ["kubectl", "run", pod, f"--image={launch.image}", "--restart=Never", f"--overrides={json.dumps(spec)}"]
    call(run, WHERE)
    try:
        call(["kubectl", "wait", "--for=condition=Ready", f"pod/{pod}", f"--timeout={COPY_SECONDS}s"], WHERE)
        call(["kubectl", "exec", pod, "--", "mkdir", "-p", target], WHERE)
        unpack = ["kubectl", "exec", "-i", pod, "--", "tar", "--extract", "--no-same-owner", f"--directory={target}"]
        with subprocess.Popen(
            unpack, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
                    archive.add(launch.payload, arcname=".")
                process.stdin.close()
            except BrokenPipeError:
                pass  # what it says on standard error is the cause
            said = process.stderr.read().decode(errors="replace")
        if process.returncode:
            raise ToolError(f"kubectl exec: {' '.join(said.split())}", process.returncode)
    finally:
        call(["kubectl", "delete", "pod", pod, "--ignore-not-found", "--now", "--wait=false"], WHERE)


def _name(job_id: str) -> str:
    return job_id.removeprefix("kubernetes:")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
