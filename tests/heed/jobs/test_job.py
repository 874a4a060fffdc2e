"""The job file: every shipped one parses, and every mistake is reported with its place."""

import tomllib
from pathlib import Path

import pytest
import tomli_w

from heed.jobs.job import JobConfig
from heed.jobs.job_file import line_of, load_job, read_job_values
from heed.jobs.pipeline import refuse_missing
from heed.jobs.registry import BUILT_IN
from heed.worlds.world import PlaygroundWorld

ROOT = Path(__file__).parents[3]
# tests/configs/test_smollm2.py tries the job of the model that `make smollm2-model` downloads.
JOBS = sorted(path for path in (ROOT / "configs" / "jobs").glob("*.toml") if path.stem != "smollm2")
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_shipped_job_parses(path: Path) -> None:
    job = load_job(path)
    assert job.name == path.stem
    # Omitted fields take defaults; written fields arrive.
    written = read_job_values(path)
    assert job.model.hidden_size == written["model"]["hidden_size"]
    stages = [stage for stage in BUILT_IN.names if stage in written]
    assert [name for name in job.stage_names if name in stages] == stages
    assert job.loop is not None or len(job.stage_names) == len(stages)  # a loop adds those of later rounds, and gains
    if job.ppo is not None:
        assert job.ppo.policy_optimizer.learning_rate == written["ppo"]["policy_optimizer"]["learning_rate"]
    assert job.world.kind == written["world"]["kind"]
    # The job as recorded in a run folder is the same job.
    assert type(job).model_validate(tomllib.loads(tomli_w.dumps(job.model_dump(mode="json", exclude_none=True)))) == job


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_shipped_job_opens_its_world(path: Path) -> None:
    job = load_job(path)
    named = [value for value in job.world.model_dump(mode="json").values() if isinstance(value, str) and "/" in value]
    absent = [name for name in named if not Path(name).exists()]
    if absent:
        pytest.skip(f"files of {path.name} are not here: {', '.join(absent)}")
    assert job.open_world().judge_names


def test_without_a_file_the_demo_is_the_job() -> None:
    assert load_job(None) == load_job(ROOT / "configs" / "jobs" / "demo.toml")
    assert isinstance(load_job(None).open_world(), PlaygroundWorld)


def test_every_stage_comes_after_its_parents() -> None:
    others = (load_job(ROOT / "configs" / "jobs" / f"{name}.toml") for name in ("rejection", "classify"))
    jobs = (load_job(DEBUG), *others)
    assert {name for job in jobs for name in job.stage_names} == set(BUILT_IN.names)
    for job in jobs:
        for stage in job.stage_names:
            before = BUILT_IN.names[: BUILT_IN.names.index(stage)]
            assert set(job.parents(stage)) <= {*BUILT_IN.preparations, *before}


def test_compare_reads_every_policy_of_the_job(tmp_path: Path) -> None:
    assert load_job(DEBUG).parents("compare") == ("pretrain", "sft", "reward", "dpo", "ppo")
    written = tomllib.loads(DEBUG.read_text(encoding="utf-8"))
    job = tmp_path / "job.toml"

    def job_of(*left_out: str, **changed: dict[str, object]) -> JobConfig:
        values = {name: value | changed.get(name, {}) if isinstance(value, dict) else value
                  for name, value in written.items() if name not in left_out}  # fmt: skip
        job.write_text(tomli_w.dumps(values))
        return load_job(job)

    assert job_of("ppo", "reward").parents("compare") == ("pretrain", "sft", "dpo")
    with pytest.raises(ValueError, match="compare needs a policy: a stage that trains one"):
        job_of("ppo", "dpo")


def test_a_source_of_a_stage_makes_it_a_parent_which_must_come_before() -> None:
    assert load_job(DEBUG).parents("reward") == ("sft", "collect")
    assert load_job(DEBUG, ["reward.rankings.source=rankings.jsonl"]).parents("reward") == ("sft",)
    with pytest.raises(ValueError, match=r"sft needs collect, which runs after it: \[collect\] was expected"):
        load_job(DEBUG, ["sft.demonstrations=[{ source = 'collect:rankings' }]"])


def test_overrides_set_dotted_keys() -> None:
    job = load_job(
        DEBUG,
        [
            "ppo.kl.coef=0.25",
            "ppo.policy_optimizer.learning_rate = 5e-6",
            "name=other",
            'engine.trackers=["tensorboard"]',
            "world.labelers_rate=true",
            "pretrain.dropout=1e-1",
            "note=two words",
            "ppo.advantage.gae_lambda=.5",
            "ppo.temperature=2.",
        ],
    )
    assert (job.ppo.advantage.gae_lambda, job.ppo.temperature) == (0.5, 2.0)
    assert job.ppo.kl.coef == 0.25
    assert job.ppo.policy_optimizer.learning_rate == 5e-6
    assert job.ppo.policy_optimizer.eps == 1e-5  # the neighbouring fields stay
    assert job.name == "other"
    assert job.engine.trackers == ("tensorboard",)
    assert job.pretrain.dropout == 0.1
    assert job.note == "two words"


def test_none_removes_a_key() -> None:
    debug = load_job(DEBUG)
    assert debug.ppo.kl.coef != 0.05
    assert debug.ppo.missing_eos_penalty
    removed = [
        "ppo.kl.coef=none",
        "ppo.missing_eos_penalty=none",
        "ppo.policy_optimizer.eps=none",
        "ppo.temperature=none",
    ]
    job = load_job(DEBUG, [*removed, "rejection=none", "ppo.advantage.value_optimizer=none", "ppo.advantage.kind=none"])
    assert (job.ppo.kl.coef, job.ppo.missing_eos_penalty, job.ppo.policy_optimizer.eps) == (0.05, 0.0, 1e-8)
    assert job.ppo.value_optimizer is None
    assert job.ppo.advantage.kind == "none", "a key that has this value is set to it"
    assert "compare" not in load_job(DEBUG, ["compare=none"]).stage_names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Unknown keys: the whole path, and similar or known keys.
        ("kl_coef=.1", r"`kl_coef`: unknown key; in \[ppo\], Heed calls it `kl\.coef`$"),
        ("responses_per_prompt=3", r"did you mean `collect\.responses_per_prompt`\?$"),
        (
            "chat_template=chat",
            r"did you mean `sft\.chat_template`, `reward\.chat_template`, .* or `ppo\.chat_template`\?$",
        ),
        ("ppo.batch_size=4", r"`batch_size`: unknown key in \[ppo\]; did you mean `ppo\.minibatch\.batch_size`\?$"),
        ("ppo.kl.coeff=none", r"--set 'ppo\.kl\.coeff=none': `coeff`: unknown key in \[ppo\.kl\]; .*`coef`"),
        ("pppo.temperature=none", r"--set 'pppo\.temperature=none': `pppo`: unknown key; did you mean `ppo`"),
        ("ppo.kl.coeff=0.1", r"`coeff`: unknown key in \[ppo\.kl\]; did you mean `coef`\?"),
        ("ppo.policy_optimizer.learning_rat=1", r"`learning_rat`: .* \[ppo\.policy_optimizer\]; .*`learning_rate`"),
        (
            "world.num_pretrain_text=5",
            r"`num_pretrain_text`: unknown key in \[world\]; did you mean `num_pretrain_texts`",
        ),
        ("modle.width=8", r"`modle`: unknown key; did you mean `model`\?"),
        (
            "engine.zzz=1",
            r"`zzz`: unknown key in \[engine\]; known keys are checkpoint_activations, collective_timeout_seconds",
        ),
        ('pretrain.texts=[{sorce="a.txt"}]', r"`sorce`: unknown key in \[pretrain\.texts\.0\]; did you mean `source`"),
        ("ppo.seed=3", r"`seed`: unknown key in \[ppo\]; it is a key of the whole job: write `seed` above the first"),
        ("ppo.dtype=bf16", r"`dtype`: unknown key in \[ppo\]; Heed calls it `engine\.precision`$"),
        # Wrong types and values: the field and what was found.
        (
            'compare.prompts=[{source="a.jsonl"},{source="b.jsonl"}]',
            r"compare\.prompts: one table \{ source = \"a\.jsonl\" \} was expected, not a list; join several",
        ),
        (
            'ppo.prompts=[{source="a.jsonl"},{sorce="b.jsonl"}]',
            r"`sorce`: unknown key in \[ppo\.prompts\.1\]; did you mean `source`",
        ),
        ('ppo.prompts=[{source="a.jsonl",max_rows=-1}]', r"ppo\.prompts\.0\.max_rows: at least 0 was expected"),
        ('ppo.prompts=[{source="a.jsonl"},{source="a.csv"}]', r"ppo: prompts\.0 and prompts\.1 are both called 'a'"),
        ("ppo.prompts=a.jsonl", r"ppo\.prompts: a table \{ source = \"a\.jsonl\" \} was expected, not 'a\.jsonl'"),
        (
            'ppo.prompts={source="a.jsonl",weight=2}',
            r"`weight`: unknown key in \[ppo\.prompts\]; only tables in a list have this key: `ppo\.prompts = \[",
        ),
        (
            'sft.demonstrations={source="a.jsonl"}',
            r"sft\.demonstrations: a list \[\{ source = \"a\.jsonl\" \}\] was expected$",
        ),
        ("seed=soon", r"seed: a whole number was expected, not 'soon'"),
        ("workers=0", r"workers: at least 1 was expected, not 0"),
        ("ppo.kl.coef=-0.5", r"ppo\.kl\.coef: at least 0 was expected, not -0\.5"),
        ("ppo.loss.clip_range=[1]", r"ppo\.loss\.clip_range: .*number"),
        ("sft.optimizer.schedule=cosinus", r"sft\.optimizer\.schedule: .*'constant', 'linear' or 'cosine'.*'cosinus'"),
        ("engine.zero_stage=4", r"engine\.zero_stage: .*was expected, not 4"),
        ("name=../up", r"name: .*found '\.\./up'"),
        ("name=a..b", r"name: letters, digits, '\.', '_' and '-' were expected, .* no '\.\.', found 'a\.\.b'"),
        ("name=my job", r"name: letters, digits, '\.', '_' and '-' were expected, .*, found 'my job'"),
        (
            "collect.prompts=a.jsonl",
            r"collect\.prompts: a table \{ source = \"a\.jsonl\" \} was expected, not 'a\.jsonl'",
        ),
        ("reward.optimizer=adam", r"reward\.optimizer: a table .*was expected, not 'adam'"),
        ("pretrain=3", r"pretrain: .*was expected, not 3"),
        ("world.kind=moon", r"world.kind is 'moon'; 'playground', or a world as 'FILE.py:NAME', was expected"),
        # Checks across fields: batches must divide, sequences must fit.
        ("sft.batch.micro_batch_size=3", r"sft\.batch: batch_size over micro_batch_size: 8 is not a multiple of 3"),
        (
            "workers=4",
            r"pretrain\.batch with workers = 4: batch_size over ranks x micro_batch_size: 16 .* multiple of 32",
        ),
        ("ppo.rollout_batch_size=12", r"ppo: rollout_batch_size over minibatch\.batch_size: 12 is not a multiple of 8"),
        ("ppo.ptx.rows=0", r"ppo\.ptx\.rows: at least 1 was expected, not 0"),
        ("ppo.advantage=gae", r'ppo\.advantage: a table with kind "gae", .* or "none" was expected, not \'gae\''),
        ("ppo.advantage=grpo", r'or "none" was expected \(docs/algorithms\.md: it is "group_mean" here\), found'),
        ("ppo.advantage.kind=rloo", r'or "none" was expected \(docs/algorithms\.md: it is "leave_one_out" here\)$'),
        ("ppo.advantage=none", r'ppo\.advantage: missing; a table with kind "gae", .* or "none" was expected'),
        (
            "ppo.advantage.kind=none",
            r'`value_optimizer`: unknown key in \[ppo\.advantage\]; only a table of kind "gae" has',
        ),
        (
            "ppo.loss.kind=response",
            r"ppo: loss\.kind 'response' has one ratio per response, but with advantage\.kind 'gae'",
        ),
        ("ppo.placement.kind=asynchronous", r"ppo\.placement\.max_staleness: missing"),
        (
            "model.hidden_size=33",
            r"model: model\.hidden_size over model\.num_attention_heads: 33 is not a multiple of 2",
        ),
        ("pretrain.seq_len=161", r"pretrain\.seq_len does not fit model\.max_position_embeddings = 160"),
        ("sft.seq_len=500", r"sft\.seq_len does not fit model\.max_position_embeddings = 160"),
        ("ppo.max_new_tokens=160", r"ppo\.max_new_tokens does not fit model\.max_position_embeddings = 160"),
        ("model.max_position_embeddings=16", r"does not fit model\.max_position_embeddings = 16"),
        # Invalid overrides.
        ("ppo.kl.coef", r"--set 'ppo\.kl\.coef': KEY=VALUE was expected"),
        ("=3", r"--set '=3': KEY=VALUE was expected"),
        ("name.more=3", r"--set 'name\.more=3': 'name' is not a section"),
    ],
)
def test_a_mistake_is_named_with_its_place(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_job(DEBUG, [override])
    assert "\n" not in str(caught.value)


def test_a_table_in_a_list_is_set_by_its_number() -> None:
    path = DEBUG.with_name("mixture.toml")
    before, after = (load_job(path, given).ppo.prompt_sources for given in ([], ["ppo.prompts.1.weight=2"]))
    assert [source.weight for source in before] == [1, 3]
    assert [source.weight for source in after] == [1, 2]
    assert after[0] == before[0]
    scored_by = load_job(path, ["ppo.prompts.0.scored_by=none"]).ppo.prompt_sources[0].scored_by
    assert scored_by == ()
    for part, words in (
        ("2.weight", "'2' is not a section: the tables have the numbers 0 to 1"),
        ("0", "'prompts' is"),
    ):
        with pytest.raises(ValueError, match=words):
            load_job(path, [f"ppo.prompts.{part}=2"])
    with pytest.raises(ValueError, match=r"`wieght`: unknown key in \[ppo\.prompts\.0\]; did you mean `weight`"):
        load_job(path, ["ppo.prompts.0.wieght=2"])


def test_the_reward_judges_only_alone_and_where_there_is_one() -> None:
    assert load_job(DEBUG, ["compare.judge_reward=true"]).compare.judge_reward
    with pytest.raises(
        ValueError, match=r"compare\.judge_from is given and so is compare\.judge_reward; one judge was"
    ):
        load_job(DEBUG, ["compare.judge_reward=true", "compare.judge_from=x"])
    without = ["reward=none", "ppo=none", "compare.judge_reward=true"]
    with pytest.raises(
        ValueError, match=r"compare\.judge_reward: the job has no reward; \[reward\], \[ppo\] or another"
    ):
        load_job(DEBUG, without)


def test_two_mistakes_are_both_named() -> None:
    with pytest.raises(ValueError, match=r"debug\.toml: .*seed.*; .*ppo\.loss\.clip_range"):
        load_job(DEBUG, ["ppo.loss.clip_range=-1", "seed=-1"])


def test_ptx_rows_must_divide_among_the_workers() -> None:
    with pytest.raises(ValueError, match=r"ppo\.ptx\.rows is 3; a multiple of workers = 2 was expected"):
        load_job(DEBUG, ["workers=2", "ppo.ptx.rows=3"])


@pytest.mark.parametrize("section", ["pretrain.optimizer", "ppo.advantage.value_optimizer"])
def test_muon_under_zero_is_refused_before_anything_runs(section: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{section}: optimizer kind 'muon' needs whole matrices, but ZeRO 1 shards them"
    ):
        load_job(DEBUG, [f"{section}.kind=muon", "engine.zero_stage=1"])
    assert load_job(DEBUG, [f"{section}.kind=muon"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=3"], "workers over engine.sequence_parallel_size: 3 is not a multiple of 2$"),
        (["model.num_attention_heads=3", "model.num_key_value_heads=3", "model.hidden_size=48"], "has 3 attention"),
        (["engine.sequence_parallel_size=4", "workers=4", "model.num_attention_heads=12", "model.num_key_value_heads=3",
          "model.hidden_size=48"], "the model has 12 attention heads and 3 key-value heads; a divisor of the former"),
        (["engine.compile_blocks=true"], "compile_blocks with sequence_parallel_size 2"),
        (["workers=4", "pretrain.batch={ batch_size = 6, micro_batch_size = 2 }"],
         r"pretrain\.batch with workers = 4 in groups of 2: batch_size over ranks x micro_batch_size: 6 is not"),
    ],
)  # fmt: skip
def test_a_sequence_that_cannot_be_split_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_job(DEBUG, ["workers=2", "engine.sequence_parallel_size=2", *overrides])


def test_an_encoders_sequences_and_a_shared_body_stay_whole() -> None:
    split = ["workers=2", "engine.sequence_parallel_size=2"]
    with pytest.raises(ValueError, match="sequence_parallel_size is 2, but the model is an encoder; 1 was expected"):
        load_job(ROOT / "configs" / "jobs" / "encoder.toml", split)
    with pytest.raises(ValueError, match=r"ppo\.lora\.shared_body with engine\.sequence_parallel_size 2: a shared"):
        load_job(DEBUG, [*split, "reward.lora={}", "ppo.lora={ shared_body = true }"])


LINEAR = [
    'model.layer_types=["linear_attention","full_attention"]', "model.linear_num_key_heads=2",
    "model.linear_num_value_heads=4", "model.linear_key_head_dim=8", "model.linear_value_head_dim=8",
    "model.linear_conv_kernel_dim=4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workers=2", "engine.sequence_parallel_size=2"], "layers of linear_attention, which read whole rows; 1 was"),
        (
            ["workers=2", "ppo.sampler.tensor_parallel_size=2"],
            r"ppo\.sampler\.tensor_parallel_size is 2, but the model",
        ),
        (
            ["ppo.sampler={ kind = 'vllm' }"],
            "model has layers of linear_attention, which have not been tried with vLLM",
        ),
    ],
)
def test_what_linear_layers_do_not_go_with_is_refused_before_anything_runs(overrides: list[str], message: str) -> None:
    assert load_job(DEBUG, LINEAR)
    with pytest.raises(ValueError, match=message):
        load_job(DEBUG, [*LINEAR, *overrides])


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    values = tomllib.loads(DEBUG.read_text(encoding="utf-8"))
    del values["reward"], values["ppo"]["num_iterations"]
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"job\.toml:\d+: ppo\.num_iterations: missing"):
        load_job(path)
    values["ppo"]["num_iterations"] = 1
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"job\.toml:\d+: ppo needs reward: \[reward\] or ppo.reward.model or .* was expected"
    ):
        load_job(path)


def test_bad_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('name = "x"\nseed = 0\nworkers = = 1\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"job\.toml: not TOML: .*line 3"):
        load_job(path)
    with pytest.raises(ValueError, match=r"absent\.toml: no such file"):
        load_job(tmp_path / "absent.toml")


def test_a_job_may_go_on_with_fewer_workers() -> None:
    assert load_job(DEBUG, ["workers=4", "pretrain.batch.micro_batch_size=4", *FOUR]).world_sizes == (4,)
    # No batch is divisible by three.
    assert load_job(DEBUG, ["workers=4", "min_workers=1", *FOUR]).world_sizes == (4, 2, 1)
    apart = ["ppo.placement.kind=disaggregated", "ppo.placement.num_generators=2"]
    assert load_job(DEBUG, ["workers=4", "min_workers=2", *FOUR, *apart]).fewest_ranks == 2 + 2 + 1
    with pytest.raises(ValueError, match=r"min_workers is 3; at most workers = 2 was expected"):
        load_job(DEBUG, ["workers=2", "min_workers=3"])
    assert load_job(DEBUG, ["workers=2", "min_workers=1", "engine.zero_stage=2"]).world_sizes == (2, 1)
    split = ["workers=4", "min_workers=1", "engine.sequence_parallel_size=2", *FOUR]
    assert load_job(DEBUG, split).world_sizes == (4, 2)  # whole groups


def test_colocated_workers_form_teams_that_can_share_the_policy() -> None:
    two = ["ppo.sampler.tensor_parallel_size=2"]
    four = ["workers=4", "min_workers=1", *FOUR]
    assert load_job(DEBUG, [*four, *two]).world_sizes == (4, 2)  # one worker is no team
    with pytest.raises(ValueError, match=r"ppo.sampler.tensor_parallel_size is 2; a divisor of workers = 1 was exp"):
        load_job(DEBUG, two)
    with pytest.raises(
        ValueError,
        match=r"ppo.sampler.tensor_parallel_size is 4; a divisor of the model's num_attention_heads = 2 was expected",
    ):
        load_job(DEBUG, [*four, "ppo.sampler.tensor_parallel_size=4"])
    apart = ["ppo.placement.kind=disaggregated", "ppo.placement.num_generators=2"]
    assert load_job(DEBUG, [*two, *apart]).num_ranks == 1 + 2 + 1


FOUR = tuple(
    f"{batch}.micro_batch_size=1" for batch in ("pretrain.batch", "sft.batch", "reward.batch", "ppo.minibatch")
)


JOB = """name = "mine"
base = "base.toml"

[sft]
seq_len = 64
optimizer = { learning_rate = "fast", schedule = "cosine" }
demonstrations = [
    { source = "a.jsonl", splitt = "x" },
]

[ppo.kl]
coef = 0.1

[[ppo.prompts]]
source = "a.jsonl"

[[ppo.prompts]]
source = "b.jsonl"
weight = "two"
"""


def test_a_mistake_is_named_with_its_line(tmp_path: Path) -> None:
    """The line of the key, or of the value or table around it, in the file that has it: the job or its base."""
    path, base = tmp_path / "job.toml", tmp_path / "base.toml"
    path.write_text(JOB)
    base.write_text("seed = 1.5\n[pretrain]\nnum_steps = 3\n[sft]\nbatch = {}\n")
    for key, place in (
        ("sft.seq_len", f"{path}:5"),
        ("sft.optimizer.learning_rate", f"{path}:6"),
        ("sft.demonstrations.0.splitt", f"{path}:7"),
        ("sft.absent", f"{path}:4"),
        ("ppo.kl.coef", f"{path}:12"),
        ("ppo.prompts.1.weight", f"{path}:19"),
        ("ppo.prompts.0.source", f"{path}:15"),
        ("sft.batch.batch_size", f"{base}:5"),
        ("seed", f"{base}:1"),
        ("absent", str(path)),
    ):
        assert line_of(path, key) == place
    with pytest.raises(ValueError, match=r"seed: a whole number was expected, not 1.5") as caught:
        load_job(path)
    said = str(caught.value)
    assert f"{base}:1: seed: " in said
    assert f"{path}:6: sft.optimizer.learning_rate: a number was expected, not 'fast'" in said
    assert f"{path}:7: `splitt`: unknown key in [sft.demonstrations.0]" in said
    with pytest.raises(ValueError, match=rf"{path}: seed: a whole number was expected, not 'x'"):
        load_job(path, ["seed=x"])


def test_a_check_across_keys_names_the_line_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'base = "{DEBUG}"\nname = "mine"\n[sft]\nseq_len = 500\n')
    with pytest.raises(ValueError, match=rf"^{path}:4: sft.seq_len does not fit model.max_position_embeddings"):
        load_job(path)
    path.write_text(f'base = "{DEBUG}"\nname = "mine"\n[sft]\nseq_len = 0\non_overlong = "x"\n')
    with pytest.raises(ValueError, match=rf"{path}:4: sft.seq_len: at least \d was expected, not 0; {path}:5: .* 'x'"):
        load_job(path)


def test_missing_data_are_named_with_the_jobs_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'base = "{DEBUG}"\nname = "mine"\n[ppo]\nprompts = {{ source = "gone.jsonl" }}\n')
    with pytest.raises(ValueError, match=rf"^{path}:4: ppo.prompts.source: gone.jsonl: no such file"):
        refuse_missing(load_job(path))
