"""The configuration of a usability study: its labelers, and its conditions, each a batch and a form."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from preferences.page.config import LabelForm, LabelingConfig, TomlConfig
from preferences.usability import Condition, Study

MAX_CONDITIONS, MAX_NAME_CHARACTERS = 8, 40
FORM_FIELDS = tuple(LabelForm.model_fields)


class StudyCondition(LabelForm):
    """A batch and the form that it is labeled with. Settings that are left out come from the labeling configuration."""

    name: str = Field(description="Name in the report; labelers see it when they are asked which form they prefer.")
    batch: str = Field(description="Batch of tasks. Conditions may share one; each form then gets different tasks.")

    @field_validator("name")
    @classmethod
    def _is_short(cls, name: str) -> str:
        if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
            raise ValueError(f"1 to {MAX_NAME_CHARACTERS} printable characters without space around them were expected")
        return name


class StudyConfig(TomlConfig):
    """A usability study: which forms are compared, by whom, and on how many tasks."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS, description="The study's name.")
    labelers: tuple[str, ...] = Field(
        min_length=2, description="Names of the labelers. To add some later, add their names and start the study again."
    )
    tasks_per_condition: int = Field(
        default=20, ge=1, description="Number of tasks that a labeler judges with each form before the questionnaire."
    )
    practice_tasks: int = Field(
        default=2,
        ge=0,
        description="Practice: number of a labeler's first answers with each form that do not count for times, accuracy"
        " and agreement.",
    )
    seed: int = Field(default=0, description="Seed for assigning orders of the forms to labelers.")
    conditions: tuple[StudyCondition, ...] = Field(
        min_length=2, max_length=MAX_CONDITIONS, description="The forms to compare, each with a batch."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.practice_tasks >= self.tasks_per_condition:
            raise ValueError(f"practice_tasks is {self.practice_tasks}; fewer than tasks_per_condition were expected")
        for what, names in (("labelers", self.labelers), ("conditions", [one.name for one in self.conditions])):
            if again := [name for name in names if list(names).count(name) > 1]:
                raise ValueError(f"{what}: {again[0]!r} is named twice; different names were expected")
        return self

    def study(self, base: LabelingConfig) -> tuple[Study, list[LabelForm]]:
        """Returns the study to store, and each condition's complete form. `base` fills in what a condition leaves out.

        Raises: ValueError for two conditions with the same form on the same batch, and for one on the screening batch.
        """
        screening = "" if base.screening is None else base.screening.batch
        for index, condition in enumerate(self.conditions):
            if condition.batch == screening:
                raise ValueError(
                    f"conditions.{index}.batch: {screening!r} is the screening batch, whose gold tasks new"
                    " labelers judge with the server's form; another batch was expected"
                )
        forms = [_form(condition, base) for condition in self.conditions]
        conditions = tuple(
            Condition(one.name, one.batch, form.version, form.model_dump(mode="json"))
            for one, form in zip(self.conditions, forms, strict=True)
        )
        for index, one in enumerate(conditions):
            same = [other for other in conditions[:index] if (other.batch, other.version) == (one.batch, one.version)]
            if same:
                raise ValueError(
                    f"conditions.{index}: {one.name!r} has the form and the batch of {same[0].name!r}; another form, or"
                    " another batch, was expected"
                )
        return Study(self.name, conditions, self.tasks_per_condition, self.practice_tasks, self.seed), forms


def _form(condition: StudyCondition, base: LabelingConfig) -> LabelForm:
    values: dict[str, Any] = {
        name: getattr(condition if name in condition.model_fields_set else base, name) for name in FORM_FIELDS
    }
    return LabelForm(**values)
