"""What can be known to be wrong before any training starts is found here: rows that do not parse, prompts too long."""

from pathlib import Path

from jobs.job import JobConfig
from jobs.run import Run
from jobs.submission import named_paths
from lm.source import skeleton
from lm.tokenizer import Tokenizer
from reading.rows import LOADERS
from reward.comparisons import encode_rankings, read_judgments
from reward.elsewhere import FunctionReward
from reward.scoring import labels_of, weights_by_label
from reward.stage import ODDITIES, RewardConfig, network_source, split_of
from sft.stage import SFTConfig, encode_demonstrations
from stages.progress import console
from training.data import read_prompts, read_texts


def refuse_missing(job: JobConfig) -> None:
    """Raise ValueError, naming the job's field, where a data file that it names is not here."""
    for field, name in named_paths(job.model_dump()):
        is_file = field.endswith(".source") and Path(name.removesuffix(".gz")).suffix in LOADERS
        if is_file and not Path(name).exists():
            raise ValueError(f"{field}: {name}: no such file")


def check_data(run: Run) -> None:
    """Read every row that a later stage will read, with the tokenizer it will use.

    Errors: ValueError naming file, line and field.
    """
    job = run.job
    if job.ppo is not None and isinstance(job.ppo.elsewhere, FunctionReward):
        _ = job.ppo.elsewhere.function
    if job.ppo is not None and job.ppo.reward_from:
        judge = run.start("ppo", "reward")
        weights_by_label(str(judge), labels_of(judge), job.ppo.objective_weights)
    if job.pretrain is not None:
        for sources in (job.pretrain.texts, job.pretrain.heldout):
            for _ in read_texts([run.resolve(data) for data in sources]):
                pass
    if job.sft is not None:
        tokenizer = sft_tokenizer(run, job.sft)
        has_source = job.model is not None and job.model.kind == "encoder-decoder"
        for sources in (job.sft.demonstrations, job.sft.heldout):
            resolved = [run.resolve(data) for data in sources]
            for _ in encode_demonstrations(has_source, tokenizer, resolved, job.sft.seq_len):
                pass
    elif job.ppo is not None:
        tokenizer = Tokenizer.load(run.start("ppo", "sft"))
    else:
        tokenizer = None
    if job.reward is not None and job.reward.rankings.source != "collect:rankings":
        check_rankings(run, run.resolve(job.reward))
    if tokenizer is None:
        return
    assert job.model is not None
    check_prompts(run, tokenizer, job.model.max_position_embeddings)


def check_rankings(run: Run, config: RewardConfig) -> None:
    """Every row of the rankings is of its format, there are some of every objective, and every conversation fits the
    model; what is odd is counted, and what is not learned.
    """
    found = read_judgments(config.rankings)
    objectives = split_of(found.rankings, config, run.job.seed).objectives
    left_out = sum(ranking.objective not in objectives for ranking in found.rankings)
    if left_out:
        console.print(f"{config.rankings.source}: {left_out:,} rankings are of objectives that are not learned")
    counts = ", ".join(f"{count:,} x {kind}" for kind, count in found.report.counts().items())
    if counts:
        console.print(f"{config.rankings.source}: oddities, told in reward/{ODDITIES}: {counts}", markup=False)
    if config.init_from:
        start = run.start("reward", "sft")
        tokenizer = Tokenizer.load(start, end=config.end_token, pad=config.pad_token)
        source = network_source(start, 0.0, seed=0, labels=config.labels)
        max_position_embeddings = skeleton(source.build).config.max_position_embeddings
    else:
        assert run.job.sft is not None
        assert run.job.model is not None
        tokenizer, max_position_embeddings = sft_tokenizer(run, run.job.sft), run.job.model.max_position_embeddings
    encode_rankings(tokenizer.with_template(config.chat_template), found.rankings, max_position_embeddings)


def sft_tokenizer(run: Run, config: SFTConfig) -> Tokenizer:
    """What SFT will tokenize with; the vocabulary is there before its parent is."""
    folder = run.start("sft", "pretrain") if config.init_from else run.tokenizer
    return Tokenizer.load(folder, end=config.end_token, pad=config.pad_token).with_template(config.chat_template)


def check_prompts(run: Run, tokenizer: Tokenizer, max_position_embeddings: int) -> None:
    """Every prompt that will be sampled from leaves room for its response."""
    job = run.job
    for name, config in (("collect", job.collect), ("ppo", job.ppo), ("compare", job.compare)):
        if config is None:
            continue
        data = run.resolve(config.prompts)
        room = max_position_embeddings - config.max_new_tokens
        for prompt in read_prompts(data):
            num_tokens = len(tokenizer.encode_prompt(prompt.messages))
            if num_tokens > room:
                raise ValueError(
                    f"{data.source}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                    f" model.max_position_embeddings for {name}.max_new_tokens = {config.max_new_tokens}"
                )
