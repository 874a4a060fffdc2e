"""What can be known to be wrong before any training starts is found here: rows that do not parse, prompts too long."""

from heed.stages import Run
from lm.tokenizer import Tokenizer
from training.data import read_conversations, read_prompts, read_texts


def check_data(run: Run) -> None:
    """Read every row that a later stage will read, with the tokenizer it will use.

    Errors: ValueError naming file, line and field.
    """
    job = run.job
    tokenizer = Tokenizer.load(run.tokenizer).with_template(job.sft.chat_template)
    for sources in (job.pretrain.texts, job.pretrain.heldout):
        for _ in read_texts([run.resolve(data) for data in sources]):
            pass
    for sources in (job.sft.demonstrations, job.sft.heldout):
        for where, messages in read_conversations([run.resolve(data) for data in sources]):
            tokens, is_response = tokenizer.encode_conversation(messages)
            num_tokens = len(tokens)
            if not any(is_response):
                raise ValueError(f"{where}: sft.chat_template {job.sft.chat_template!r} shows no assistant's response")
            if num_tokens > job.sft.row_tokens:
                raise ValueError(
                    f"{where}: the conversation has {num_tokens} tokens; sft.row_tokens allows {job.sft.row_tokens}"
                )
    for name, config in (("collect", job.collect), ("ppo", job.ppo), ("compare", job.compare)):
        data = run.resolve(config.prompts)
        room = job.model.context_tokens - config.max_response_tokens
        for prompt in read_prompts(data):
            num_tokens = len(tokenizer.encode_prompt(prompt.messages))
            if num_tokens > room:
                raise ValueError(
                    f"{data.source}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                    f" model.context_tokens for {name}.max_response_tokens = {config.max_response_tokens}"
                )
