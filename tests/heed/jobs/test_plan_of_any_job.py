"""`heed plan` of drawn jobs: every job that a run accepts gets a plan, or one line that says why not."""

from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st

from heed.jobs.job_file import job_values, load_job
from heed.jobs.plan import Setting, make_plan
from heed.jobs.times import GIB, GPUS, Hardware

DEBUG = Path(__file__).parents[3] / "configs" / "jobs" / "debug.toml"
NUM_JOBS = 300
OTHER_MODEL = "Qwen/Qwen2.5-0.5B"  # its shape is built in

CPU = Hardware("cpu", 8 * GIB, 1e11, 1e10, 0.0, is_gpu=False)  # instead of this machine's, whose rates are measured
HARDWARE = (GPUS["h100"], GPUS["l40s"], CPU)
DEBUG_VALUES = job_values(DEBUG)

Values = dict[str, Any]


def of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def maybe(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draws a value, or None, which leaves the key out."""
    return st.none() | value


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Values]:
    return st.fixed_dictionaries(keys).map(
        lambda drawn: {key: value for key, value in drawn.items() if value is not None}
    )


WORLD, MISSING = {"source": "world:ppo_prompts"}, {"source": "no-such-folder/rows.jsonl"}
ROW_BATCHES = table(batch_size=of(16, 32), micro_batch_size=of(1, 2, 4))
BATCHES = ROW_BATCHES | table(batch_size=of(16), micro_batch_tokens=of(64, 640, 4096), forward_tokens=maybe(of(1000)))
ADAMW = table(learning_rate=of(1e-3))
LORA = table(rank=of(1, 4), targets=of("all", "attention", "mlp"))
ALL_WEIGHTS = table(optimizer=table(learning_rate=of(1e-3), kind=of("adamw", "muon"), trained_layers=maybe(of(0, 1))))
TRAINED = ALL_WEIGHTS | table(optimizer=ADAMW, lora=LORA)
FUNCTION = table(kind=of("function"), function=of("heed.worlds.rewards:gold"))
JUDGE = table(
    kind=of("judge"),
    model=of(OTHER_MODEL, "https://example.org/v1#judge"),
    rubric=of({"template": "$prompt\n$response\n$criterion", "criteria": {"asked": {"text": "answer"}}}),
)
SCORES = FUNCTION | table(kind=of("url"), url=of("http://127.0.0.1:9/score")) | table(kind=of("verifier")) | JUDGE
SUM = table(kind=of("sum"), objective_weights=of({"a": 1.0, "b": 0.0}), sources=table(a=SCORES, b=FUNCTION))
PPO = table(
    prompts=of(WORLD, MISSING, [WORLD | {"name": "a", "weight": 1}, MISSING | {"name": "b", "weight": 3}]),
    num_iterations=of(2, 3),
    rollout_batch_size=of(32, 64),
    num_epochs=of(1, 2),
    minibatch=BATCHES,
    max_new_tokens=of(1, 16, 64),
    policy_optimizer=ADAMW,
    advantage=table(kind=of("gae"), value_optimizer=ADAMW, samples_per_prompt=of(1, 2))
    | table(kind=of("group_mean", "leave_one_out"), samples_per_prompt=of(2, 4), oversample=of(1.0, 1.5))
    | of({"kind": "none"}),
    placement=of({}, {})
    | table(kind=of("disaggregated"), num_generators=of(1, 2, 4), num_scorers=of(1, 2))
    | table(kind=of("asynchronous"), num_generators=of(2), max_staleness=of(1))
    | table(kind=of("continuous"), num_generators=of(2), num_rows=of(0, 40)),
    sampler=table(kind=of("heed", "vllm"), tensor_parallel_size=of(1, 1, 2)),
    memory=of("fast", "fast", "balanced", "small"),
    lora=maybe(table(rank=of(4), sends=of("merged", "adapter")) | table(rank=of(2), shared_body=of(True))),
    ptx=maybe(table(coef=of(0.1), rows=of(4, 8))),
    ema=table(decay=of(0.0, 0.9)),
    environment=maybe(table(kind=of("calculator"), max_turns=of(2))),
    teachers=of([], [], [{"model": OTHER_MODEL}], [{"model": OTHER_MODEL, "name": name} for name in "ab"]),
)
ENGINES = table(
    zero_stage=of(0, 0, 1, 2, 3), precision=of("auto", "fp32", "bf16"), checkpoint_activations=of(False, True)
)
SHAPES = table(
    num_attention_heads=of(2, 4),
    mlp=of("relu2", "swiglu", "gelu"),
    num_hidden_layers=of(1, 2),
    kind=of(*["decoder"] * 8, "encoder", "encoder-decoder"),
)
RANKINGS = table(rankings=of({"source": "collect:rankings"}, MISSING), batch=BATCHES)
LAYERS = of({}, {"dropped_layers": 1, "added_layers": 2})
CLASSIFY = table(task=of("sequence", "token"), data=of([MISSING]), heldout=of([MISSING]), batch=ROW_BATCHES)
REJECTION = table(prompts=of(WORLD), num_samples=of(2, 8), max_new_tokens=of(16), seq_len=of(64), batch=ROW_BATCHES)
KINDS = {"encoder": ("pretrain", "classify"), "encoder-decoder": ("pretrain", "sft")}
OPTIONAL = ("collect", "reward", "rejection", "dpo", "ppo", "compare")


def both(first: st.SearchStrategy[Values], second: st.SearchStrategy[Values]) -> st.SearchStrategy[Values]:
    return st.tuples(first, second).map(lambda drawn: drawn[0] | drawn[1])


OF_STAGES = {
    "pretrain": both(ALL_WEIGHTS, table(batch=ROW_BATCHES, seq_len=of(16, 65), dropout=of(0.0, 0.1))),
    "classify": both(ALL_WEIGHTS, CLASSIFY),
    "sft": both(TRAINED, table(batch=ROW_BATCHES)),
    "reward": both(TRAINED | both(LAYERS, ALL_WEIGHTS), RANKINGS),
    "rejection": both(TRAINED, REJECTION),
    "dpo": both(TRAINED, both(RANKINGS, table(loss=of("sigmoid", "ipo", "kto", "simpo")))),
    "ppo": PPO,
}


@st.composite
def jobs(draw: st.DrawFn) -> Values:
    """Draws the values of a job: debug.toml with other stages, shapes, batches, engines, and algorithms of PPO. One in
    four is refused when it is loaded.
    """
    debug, engine, model = DEBUG_VALUES, draw(ENGINES), draw(SHAPES)
    stages = KINDS.get(model["kind"]) or ("pretrain", "sft", *(name for name in OPTIONAL if draw(st.booleans())))
    values = {name: table for name, table in debug.items() if name not in ("sft", *OPTIONAL)}
    values |= {name: {**debug.get(name, {}), **draw(OF_STAGES.get(name, of({})))} for name in stages}
    values |= {"workers": draw(of(1, 2, 4)), "engine": engine, "model": debug["model"] | model}
    values["model"] |= {"num_encoder_layers": 2} if model["kind"] == "encoder-decoder" else {}
    if model["kind"] == "decoder" and values["workers"] > 1:
        engine["sequence_parallel_size"] = draw(of(1, 2))
    if engine["zero_stage"]:
        engine["offload"] = draw(of([], ["optimizer"], ["optimizer", "parameters"][: 1 + engine["zero_stage"] // 3]))
        for name in stages:  # Muon needs whole matrices
            values[name].get("optimizer", {}).pop("kind", None)
    if "ppo" in stages:
        of_model = of({}, {"kind": "model"})
        elsewhere = SCORES | SUM | of({"kind": "model", "model": OTHER_MODEL}, {"kind": "none"})
        values["ppo"]["reward"] = draw(of_model if "reward" in stages else elsewhere)
    for name in {"reward", "dpo"}.intersection(stages) if "collect" not in stages else ():
        values[name]["rankings"] = MISSING
    if "rejection" in stages and "reward" not in stages:
        values["rejection"]["reward_from"] = OTHER_MODEL
    return values


def test_every_drawn_job_that_a_run_accepts_has_a_plan(tmp_path: Path) -> None:
    """There is a plan, or one line that says which field is wrong and what was expected."""
    path, lines, planned = tmp_path / "job.toml", list[str](), list[str]()

    @settings(
        max_examples=NUM_JOBS,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(values=jobs(), hardware=of(*HARDWARE), per_node=of(2, 8))
    def check(values: Values, hardware: Hardware, per_node: int) -> None:
        text = tomli_w.dumps(values)
        path.write_text(text, encoding="utf-8")
        try:
            job = load_job(path, opens_models=False)
        except ValueError:
            assume(False)  # a run refuses it, too
        note(text)
        planned.extend(values)
        try:
            plan = make_plan(job, Setting(hardware, 0.5, 1000, per_node))
        except ValueError as error:
            lines.append(str(error))
            return
        for stage in plan.stages:
            assert stage.peak > 0
            assert all(memory.peak_phase in memory.phases for memory in stage.memory.values())
            assert stage.seconds >= 0

    check()
    assert planned.count("name") == NUM_JOBS
    assert {*planned} >= {*OF_STAGES, "collect", "compare"}
    assert [line for line in lines if "\n" in line or "expected" not in line] == []
