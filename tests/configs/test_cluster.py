"""Starting points for clusters, and the page that explains them: well-formed, and their commands are those we have."""

import re
import shlex
import subprocess
import tomllib
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
    for command in re.findall(r"^ *(heed (?:run|submit|jobs)\b.*?)(?: > /dev/null.*| 2>&1.*)?$", text, re.MULTILINE)
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
    said = "".join(path.read_text() for folder in ("cluster", "heed", "jobs") for path in (ROOT / folder).rglob("*.py"))
    quoted = re.findall(r"^\| `([^`]+)` \|", DOCUMENTS["cluster.md"], re.MULTILINE)
    assert len(quoted) >= 9
    as_written = [text.replace("300", "{wait_seconds:.0f}").replace("60", "{seconds:g}") for text in quoted]
    assert [text for text in as_written if text not in said] == []


def test_the_page_shows_the_defaults_of_the_section_on_the_cluster() -> None:
    shown = re.search(r"^```\n(\[cluster\]\n.*?)^```", DOCUMENTS["cluster.md"], re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert ClusterConfig.model_validate(tomllib.loads(shown[1])["cluster"]) == ClusterConfig()
    assert len(tomllib.loads(shown[1])["cluster"]) == len(ClusterConfig.model_fields)


def test_the_slurm_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", FOLDER / "slurm.sbatch"], check=True)


def test_the_ray_cluster_has_what_kuberay_needs() -> None:
    claim, cluster = yaml.safe_load_all((FOLDER / "raycluster.yaml").read_text())
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == PINS["ray"]
    assert spec["authOptions"] == {"mode": "token"}
    (workers,) = spec["workerGroupSpecs"]
    assert workers["groupName"]
    assert 1 <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], workers)]
    for group, pod in zip((spec["headGroupSpec"], workers), pods, strict=True):
        assert isinstance(group["rayStartParams"], dict)
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        # The runs folder is the same claim under the same path everywhere.
        assert container["volumeMounts"] == [{"mountPath": "/runs", "name": "runs"}]
        volume = {"name": "runs", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        assert pod["volumes"] == [volume]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
