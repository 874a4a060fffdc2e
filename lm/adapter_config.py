"""`adapter_config.json` as PEFT writes it: which maps have an adapter, of which rank and scale.

Checked against PEFT 0.21 (`peft/tuners/lora/config.py`, `check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, ValidationError

from lm.tokenizer import read_json

# Fields that change nothing once an adapter is trained, whatever they say. PEFT has many more, whose meaning Heed does
# not compute: they must be off.
WITHOUT_EFFECT = {
    "auto_mapping", "peft_version", "inference_mode", "fan_in_fan_out", "lora_dropout", "megatron_core",
    "qalora_group_size", "runtime_config", "eva_config", "corda_config", "loftq_config", "lora_ga_config",
}  # fmt: skip
# The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base's weights, which the adapter's files do not have.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]


class AdapterConfig(BaseModel):
    """The fields that are read. Layers have the base's names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peft_type: Literal["LORA"]
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: StrictInt = Field(ge=1)
    lora_alpha: StrictFloat = Field(gt=0, allow_inf_nan=False)
    rank_pattern: dict[Pattern, StrictInt] | None = None
    alpha_pattern: dict[Pattern, StrictFloat] | None = None
    use_rslora: bool | None = None
    bias: Literal["none"] | None = None
    init_lora_weights: bool | str | None = None
    target_modules: list[str] | Pattern
    exclude_modules: list[str] | Pattern | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Pattern] | Pattern | None = None
    modules_to_save: list[Pattern] | None = None

    @classmethod
    def read(cls, path: Path) -> "AdapterConfig":
        """Raises: ValueError naming file, field and value for another type of adapter, a missing field, and an option
        that Heed does not compute.
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the folder of an adapter in PEFT's layout was expected")
        raw = read_json(path)
        if raw.get("peft_type") != "LORA":  # another type has other fields; the first thing to say is which it is
            raise ValueError(f"{path}: peft_type is {raw.get('peft_type')!r}; 'LORA' was expected")
        initial = raw.get("init_lora_weights")
        if (initial.lower() if isinstance(initial, str) else initial) not in INITIALISATIONS:
            known = " or ".join(map(repr, INITIALISATIONS))
            raise ValueError(
                f"{path}: init_lora_weights is {initial!r}; {known} was expected, which leave the base's weights as"
                " they are (PEFT's save_pretrained converts others, given path_initial_model_for_weight_conversion)"
            )
        for field, value in raw.items():
            if field not in cls.model_fields and field not in WITHOUT_EFFECT and value:
                raise ValueError(f"{path}: {field} is {value!r}; Heed reads adapters without it")
        try:
            return cls.model_validate({field: raw[field] for field in cls.model_fields if field in raw})
        except ValidationError as error:
            raise ValueError(f"{path}: {_explained(error, raw)}") from None

    def rank(self, layer: str) -> int:
        """The rank of a layer's adapter."""
        return _of_pattern(self.rank_pattern, layer, self.r)

    def scale(self, layer: str) -> float:
        """alpha / rank, or alpha / √rank in rank-stabilised LoRA (arXiv 2312.03732)."""
        rank = self.rank(layer)
        alpha = _of_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, layer: str) -> bool:
        """Whether PEFT puts an adapter on the layer of this name; it leaves out a file's tensors of any other."""
        is_saved = any(re.match(rf"(^|.*\.){name}($|\..*)", layer) for name in self.modules_to_save or ())
        if is_saved or _names(self.exclude_modules, layer):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or _names(self.target_modules, layer)
        return _names(self.target_modules, layer) and self._transforms(layer)

    def saves(self, module: str) -> bool:
        """Whether the file must hold a module's weights whole, itself or as a part of another module."""
        parts = module.split(".")
        owners = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return any(owner.endswith(name) for owner in owners for name in self.modules_to_save or ())

    def _transforms(self, layer: str) -> bool:
        """Whether a layer is one of `layers_to_transform`, which are counted by the first number in names."""
        wanted, patterns = self.layers_to_transform, self.layers_pattern
        if wanted is None or wanted == []:
            return True
        listed = [patterns] if isinstance(patterns, str) else patterns
        places = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in listed or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for place in places if (match := re.match(place, layer))), None)
        return found is not None and int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)


def _names(modules: str | Sequence[str] | None, layer: str) -> bool:
    """Whether modules, an expression for whole names or a list of their ends, name the layer."""
    if isinstance(modules, str):
        return re.fullmatch(modules, layer) is not None
    return any(f".{layer}".endswith(f".{name}") for name in modules or ())


def _of_pattern(values: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """The value of the first pattern that is the whole end of the layer's name."""
    found = (value for pattern, value in (values or {}).items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(found, default)


def _explained(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The first of the errors: field, value, and what was expected."""
    first = error.errors()[0]
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field} is {raw[field]!r}; {first['msg'].removeprefix('Value error, ')}"
