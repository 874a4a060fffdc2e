"""Makes the samples label_studio_*.json with Label Studio's own server. Usage, with label-studio 1.23.2:

    label-studio start --no-browser --port 8733 --username ann@example.org --password PASSWORD --user-token TOKEN
    python make_label_studio.py http://127.0.0.1:8733 ann@example.org PASSWORD FOLDER

The configurations are like those of Label Studio's templates for human preferences and for ranking.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx

PAIRWISE = """
<View>
  <Text name="prompt" value="$prompt"/>
  <Pairwise name="better" toName="answer1,answer2"/>
  <Text name="answer1" value="$answer1"/>
  <Text name="answer2" value="$answer2"/>
  <Rating name="quality_1" toName="answer1"/>
  <Rating name="quality_2" toName="answer2"/>
  <Choices name="equal" toName="prompt"><Choice value="equally good"/><Choice value="equally bad"/></Choices>
  <TextArea name="comment" toName="prompt"/>
</View>
"""
RANKER = """
<View>
  <Text name="prompt" value="$prompt"/>
  <List name="items" value="$items" title="Answers"/>
  <Ranker name="rank" toName="items"/>
</View>
"""
PAIR = {"prompt": "Which bird?", "answer1": "A crow.", "answer2": "A cow.", "topic": "birds"}
OTHER = {"prompt": "Why?", "answer1": "Because.", "answer2": "Wings."}
LIST = {
    "prompt": "When?",
    "items": [{"id": name, "title": name, "body": text} for name, text in (("a", "Now."), ("b", "Never."), ("c", "?"))],
}


def result(control: str, about: str, kind: str, **value: Any) -> dict[str, Any]:
    return {"from_name": control, "to_name": about, "type": kind, "value": value}


PAIRWISE_TASKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [  # each with its annotations
    (
        PAIR,
        [
            {
                "lead_time": 12.5,
                "result": [
                    result("better", "answer1", "pairwise", selected="left"),
                    result("quality_1", "answer1", "rating", rating=5),
                    result("quality_2", "answer2", "rating", rating=2),
                    result("comment", "prompt", "textarea", text=["No bird."]),
                ],
            },
            {"lead_time": 3.0, "result": [result("better", "answer1", "pairwise", selected="right")]},
        ],
    ),
    (
        OTHER,
        [
            {"lead_time": 2.0, "result": [result("equal", "prompt", "choices", choices=["equally bad"])]},
            {"lead_time": 1.0, "was_cancelled": True, "result": []},
        ],
    ),
    (OTHER | {"prompt": "How?"}, []),
]
RANKER_TASKS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (LIST, [{"lead_time": 8.0, "result": [result("rank", "items", "ranker", ranker={"rank": ["c", "a", "b"]})]}])
]


def main(url: str, email: str, password: str, folder: Path) -> None:
    with httpx.Client(base_url=url, follow_redirects=True, timeout=60) as client:
        client.get("/user/login/")
        form = {"email": email, "password": password, "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        client.post("/user/login/", data=form, headers={"Referer": url}).raise_for_status()
        client.headers.update({"X-CSRFToken": client.cookies["csrftoken"], "Referer": url})
        for name, config, tasks in (("pairwise", PAIRWISE, PAIRWISE_TASKS), ("ranker", RANKER, RANKER_TASKS)):
            made = client.post("/api/projects", json={"title": name, "label_config": config})
            made.raise_for_status()
            project = made.json()["id"]
            for data, annotations in tasks:
                task = client.post("/api/tasks", json={"project": project, "data": data})
                task.raise_for_status()
                for annotation in annotations:
                    client.post(f"/api/tasks/{task.json()['id']}/annotations", json=annotation).raise_for_status()
            query = {"exportType": "JSON", "download_all_tasks": "true"}
            found = client.get(f"/api/projects/{project}/export", params=query)
            found.raise_for_status()
            text = json.dumps(found.json(), indent=1) + "\n"
            (folder / f"label_studio_{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
