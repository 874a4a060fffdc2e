"""What can be known to be wrong before any training starts is found here: rows that do not parse, prompts too long."""

from heed.stages import Run
from lm.tokenizer import Tokenizer
from reward.elsewhere import FunctionReward
from sft.stage import SFTConfig, encode_demonstrations
from training.data import read_prompts, read_texts


def check_data(run: Run) -> None:
    """Read every row that a later stage will read, with the tokenizer it will use.

    Errors: ValueError naming file, line and field.
    """
    job = run.job
    if job.ppo is not None and isinstance(job.ppo.elsewhere, FunctionReward):
        _ = job.ppo.elsewhere.function
    if job.pretrain is not None:
        for sources in (job.pretrain.texts, job.pretrain.heldout):
            for _ in read_texts([run.resolve(data) for data in sources]):
                pass
    if job.sft is not None:
        tokenizer = sft_tokenizer(run, job.sft)
        has_source = job.model is not None and job.model.kind == "encoder-decoder"
        for sources in (job.sft.demonstrations, job.sft.heldout):
            resolved = [run.resolve(data) for data in sources]
            for _ in encode_demonstrations(has_source, tokenizer, resolved, job.sft.row_tokens):
                pass
    elif job.ppo is not None:
        tokenizer = Tokenizer.load(run.start("ppo", "sft"))
    else:
        return
    assert job.model is not None
    check_prompts(run, tokenizer, job.model.context_tokens)


def sft_tokenizer(run: Run, config: SFTConfig) -> Tokenizer:
    """What SFT will tokenize with; the vocabulary is there before its parent is."""
    folder = run.start("sft", "pretrain") if config.init_from else run.tokenizer
    return Tokenizer.load(folder, end=config.end_token, pad=config.pad_token).with_template(config.chat_template)


def check_prompts(run: Run, tokenizer: Tokenizer, context_tokens: int) -> None:
    """Every prompt that will be sampled from leaves room for its response."""
    job = run.job
    for name, config in (("collect", job.collect), ("ppo", job.ppo), ("compare", job.compare)):
        if config is None:
            continue
        data = run.resolve(config.prompts)
        room = context_tokens - config.max_response_tokens
        for prompt in read_prompts(data):
            num_tokens = len(tokenizer.encode_prompt(prompt.messages))
            if num_tokens > room:
                raise ValueError(
                    f"{data.source}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                    f" model.context_tokens for {name}.max_response_tokens = {config.max_response_tokens}"
                )
