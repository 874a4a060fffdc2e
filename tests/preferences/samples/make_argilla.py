"""Makes argilla_records.json and argilla_columns.jsonl with Argilla's own client. Usage, with argilla 2.8.0:

PYTHONPATH=. python tests/preferences/samples/make_argilla.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import argilla as rg
from argilla._models import RecordModel, SuggestionModel, UserResponseModel
from argilla.records._io import HFDatasetsIO, JsonIO
from argilla.records._resource import Record

from tests.preferences.samples.argilla_server import serve

ANN, BO, CY = (str(UUID(int=number)) for number in (1, 2, 3))


def answers(user: str, status: str, **values: Any) -> UserResponseModel:
    return UserResponseModel(user_id=user, status=status, values={name: {"value": of} for name, of in values.items()})


def ranking(*options: str) -> list[dict[str, Any]]:
    return [{"value": option, "rank": rank} for rank, option in enumerate(options, start=1)]


def models(why: UUID) -> list[RecordModel]:
    """Returns records as the server sends them; `why` is the id of that question."""
    return [
        RecordModel(
            id=uuid4(),
            external_id="birds-1",
            status="completed",
            fields={
                "prompt": [{"role": "user", "content": "Which bird?"}],
                "response1": "A crow.",
                "response2": "A cow.",
            },
            metadata={"topic": "birds"},
            responses=[
                answers(
                    ANN,
                    "submitted",
                    ranking=ranking("response1", "response2"),
                    quality_1=5,
                    quality_2=2,
                    why="No bird.",
                ),
                answers(BO, "submitted", ranking=ranking("response2", "response1"), quality_1=3, quality_2=4),
                answers(CY, "discarded"),
            ],
            suggestions=[SuggestionModel(question_name="why", question_id=why, value="A crow is.", agent="gpt")],
        ),
        RecordModel(
            id=uuid4(),
            external_id="birds-2",
            fields={"prompt": [{"role": "user", "content": "Why?"}], "response1": "Because.", "response2": "Wings."},
            responses=[answers(ANN, "draft", ranking=ranking("response1", "response2"))],
        ),
        RecordModel(
            id=uuid4(),
            external_id="birds-3",
            fields={"prompt": [{"role": "user", "content": "When?"}], "response1": "Now.", "response2": "Never."},
        ),
    ]


def main(folder: Path) -> None:
    client = rg.Argilla(api_url=serve().url, api_key="key")
    settings = rg.Settings(
        fields=[rg.ChatField(name="prompt"), rg.TextField(name="response1"), rg.TextField(name="response2")],
        questions=[
            rg.RankingQuestion(name="ranking", values=["response1", "response2"]),
            *(rg.RatingQuestion(name=f"quality_{number}", values=[1, 2, 3, 4, 5]) for number in (1, 2)),
            rg.TextQuestion(name="why", required=False),
        ],
    )
    dataset = rg.Dataset(name="birds", workspace="labels", settings=settings, client=client)
    dataset.create()
    records = [Record.from_model(model, dataset) for model in models(dataset.settings.questions["why"].id)]
    for record in records:  # server ids differ at every run
        record._model.id = None
    JsonIO.to_json(records, folder / "argilla_records.json")
    HFDatasetsIO.to_datasets(records, dataset).to_json(folder / "argilla_columns.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
