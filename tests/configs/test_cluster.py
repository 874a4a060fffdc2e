"""Starting points for clusters, and the page that explains them: well-formed, and their commands are those we have."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cluster.config import ClusterConfig
from heed.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "cluster"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
DOCUMENTS = {
    path.name: path.read_text() for path in (ROOT / "docs/jobs.md", ROOT / "docs/cluster.md", FOLDER / "slurm.sbatch")
}
COMMANDS = [
    pytest.param(command, id=command)
    for text in DOCUMENTS.values()
    for command in re.findall(r"^ *(heed (?:run|submit|jobs)\b.*?)(?: *[>&|].*)?$", text, re.MULTILINE)
]


def silence(command: Any) -> None:
    """Make a command do nothing but parse."""
    for inner in getattr(command, "commands", {}).values():
        silence(inner)
    if not hasattr(command, "commands"):
        command.callback = lambda **_: None


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_that_is_shown_parses(line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "$@"]
    command = get_command(app)
    silence(command)
    command.main(words[1:], standalone_mode=False)


def test_commands_were_found_in_each_document() -> None:
    assert {name for name, text in DOCUMENTS.items() if re.search(r"^heed submit", text, re.MULTILINE)} == {*DOCUMENTS}
    assert {"submit", "jobs"} <= {str(param.values[0]).split()[1] for param in COMMANDS}


def test_the_page_names_files_that_exist() -> None:
    named = re.findall(r"configs/[\w./-]+\w", DOCUMENTS["cluster.md"] + DOCUMENTS["slurm.sbatch"])
    assert {"configs/cluster/raycluster.yaml", "configs/cluster/slurm.sbatch", "configs/cluster/Dockerfile"} <= {*named}
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_page_quotes_what_is_said() -> None:
    folders = ("cluster", "heed", "files", "preferences")
    said = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    quoted = re.findall(r"^\| `([^`]+)` \|", DOCUMENTS["cluster.md"], re.MULTILINE)
    assert len(quoted) >= 9
    # A pattern for each quote, in which the code writes the numbers and "..." as expressions.
    patterns = {quote: re.sub(r"300|60|\\\.\\\.\\\.", r"\\{[^}]+\\}", re.escape(quote)) for quote in quoted}
    assert [quote for quote, pattern in patterns.items() if not re.search(pattern, said)] == []


def test_the_page_shows_the_defaults_of_the_section_on_the_cluster() -> None:
    shown = re.search(r"^```\n(\[cluster\]\n.*?)^```", DOCUMENTS["cluster.md"], re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert ClusterConfig.model_validate(tomllib.loads(shown[1])["cluster"]) == ClusterConfig()
    assert len(tomllib.loads(shown[1])["cluster"]) == len(ClusterConfig.model_fields)


# The script calls these in place of Slurm, Ray and Heed; each program records its call. `heed jobs list` answers from
# the third time on, unless the head is dead; `heed submit` follows a job until it is killed, or ends as the test says.
PROGRAMS = {
    "srun": """while [[ $1 == --* ]]; do shift; done; exec "$@" """,
    "scontrol": """[[ $1 != show ]] || printf '%s\n' node1 node2""",
    "hostname": "echo 10.0.0.1 172.17.0.1",
    "ray": """
if [[ $1 == get-auth-token ]]; then
    mkdir -p ~/.ray; echo secret > ~/.ray/auth_token; chmod 644 ~/.ray/auth_token; exit
fi
if [[ $2 == --head ]]; then last=${!#}; mkdir -p "${last#--temp-dir=}"; fi
exec sleep-truly 60 > /dev/null 2>&1""",
    "sleep": "exec sleep-truly 0.02",
    "heed": """
if [[ $1 == submit ]]; then
    until grep -q "^ray start --block" "$CALLS"; do sleep-truly 0.05; done
    [[ -z ${ENDS-} ]] || exit "$ENDS"; exec sleep-truly 60
fi
[[ -z ${DEAD-} ]] || { echo "error: no answer" >&2; exit 2; }
[[ -e /tmp/ray-$SLURM_JOB_ID && $(grep -c "heed jobs list" "$CALLS") -ge 3 ]]""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Starts the script in its own folder, with programs that record their calls; returns it and the records."""
    programs, activate, calls = tmp_path / "bin", tmp_path / ".venv" / "bin" / "activate", tmp_path / "calls"
    programs.mkdir()
    activate.parent.mkdir(parents=True)
    activate.touch()
    calls.touch()
    for name, body in PROGRAMS.items():
        path = programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$CALLS"\n{body}\n')
        path.chmod(0o755)
    (programs / "sleep-truly").symlink_to(str(shutil.which("sleep")))
    job_id = str(10**7 + os.getpid())  # names the folder of Ray's files in /tmp
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), "CALLS": str(calls),
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": job_id, "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "4",
    }  # fmt: skip
    started = []

    def start(**more: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            ["bash", FOLDER / "slurm.sbatch", "job.toml", "/shared/runs", "--only", "sft"],
            env={**environment, **more}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
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
def test_the_slurm_job_ends_as_the_run_ends(slurm: StartSlurm, tmp_path: Path, code: int) -> None:
    process, calls = slurm(ENDS=str(code))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    made = calls.read_text().splitlines()
    assert "heed submit job.toml --runs /shared/runs --only sft" in made
    (head,) = (call for call in made if call.startswith("ray start --head"))
    assert "--node-ip-address=10.0.0.1 " in head
    assert any(re.match(r"ray start --block --address=10\.0\.0\.1:\d+ ", call) for call in made)
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert not any(call.startswith("scontrol requeue") for call in made)


def test_a_slurm_job_that_reaches_its_time_limit_submits_itself_again(slurm: StartSlurm) -> None:
    process, calls = slurm()
    end = time.monotonic() + 60
    while not {"heed submit", "ray start --block"} <= {*re.findall("heed submit|ray start --block", calls.read_text())}:
        assert time.monotonic() < end, calls.read_text()
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "submitted again, to resume from the newest checkpoint" in said
    *_, cleaned, requeued = calls.read_text().splitlines()
    assert re.fullmatch(r"srun --ntasks=2 --ntasks-per-node=1 rm -rf /tmp/ray-\d+", cleaned)
    assert re.fullmatch(r"scontrol requeue \d+", requeued)


def test_a_head_that_does_not_come_up_ends_the_slurm_job(slurm: StartSlurm) -> None:
    process, calls = slurm(DEAD="yes")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Ray's head on node1 (10.0.0.1) did not come up in 60 tries:\nerror: no answer\n" in said
    assert "heed submit" not in calls.read_text()


def test_the_slurm_script_asks_for_a_signal_and_to_be_requeued() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", DOCUMENTS["slurm.sbatch"], re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append"} <= {*options}


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say_of_the_slurm_script() -> None:
    checked = subprocess.run(["shellcheck", FOLDER / "slurm.sbatch"], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


MANIFEST = (FOLDER / "raycluster.yaml").read_text()


def pods_of(cluster: Any) -> list[Any]:
    spec = cluster["spec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_the_ray_cluster_has_what_kuberay_needs() -> None:
    claim, cluster = yaml.safe_load_all(MANIFEST)
    check_ray_cluster(cluster, {"/runs": claim})


def test_the_lines_that_are_commented_out_are_valid_too() -> None:
    claim, hub_claim, cluster = yaml.safe_load_all(re.sub("^#-", "", MANIFEST, flags=re.MULTILINE))
    check_ray_cluster(cluster, {"/runs": claim, "/hub": hub_claim})
    (head, worker) = pods_of(cluster)
    assert [*worker["nodeSelector"]] == ["nvidia.com/gpu.product"]
    assert worker["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for pod in (head, worker):
        assert pod["imagePullSecrets"] == [{"name": "registry-login"}]
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "heed-keys"}}]
        assert {"name": "HF_HOME", "value": "/hub"} in container["env"]
    assert "create secret generic heed-keys " in MANIFEST


def check_ray_cluster(cluster: Any, claims: dict[str, Any]) -> None:
    """Checks a RayCluster. The keys of `claims` are the paths at which every pod mounts them."""
    for claim in claims.values():
        assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == PINS["ray"]
    assert spec["authOptions"] == {"mode": "token"}
    (workers,) = spec["workerGroupSpecs"]
    assert workers["groupName"]
    assert 1 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group, pod in zip((spec["headGroupSpec"], workers), pods_of(cluster), strict=True):
        assert isinstance(group["rayStartParams"], dict)
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        # A folder is the same claim at the same path in every container.
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == [*claims]
        assert pod["volumes"] == [
            {
                "name": mount["name"],
                "persistentVolumeClaim": {"claimName": claims[mount["mountPath"]]["metadata"]["name"]},
            }
            for mount in container["volumeMounts"]
        ]
    assert len({pod["containers"][0]["image"] for pod in pods_of(cluster)}) == 1
