"""Validates a project with label-studio-sdk 2.1.2, and converts it to JSON_MIN: PROJECT FOLDER."""

import json
import sys
from pathlib import Path

from label_studio_sdk.converter import Converter
from label_studio_sdk.label_interface import LabelInterface

project, folder = Path(sys.argv[1]), sys.argv[2]
config = (project / "label_config.xml").read_text()
tasks = json.loads((project / "tasks.json").read_text())
interface = LabelInterface(config)
interface.validate()
print(
    json.dumps(
        {
            "tasks": [interface.validate_task({"data": task["data"]}) for task in tasks],
            "annotations": [interface.validate_annotation(one) for task in tasks for one in task["annotations"]],
        }
    )
)
Converter(config, project_dir=None).convert(str(project / "tasks.json"), folder, "JSON_MIN", is_dir=False)
