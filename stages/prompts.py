"""Prompts are read and measured before anything is sampled from them."""

from lm.tokenizer import Tokenizer
from stages.run import StageRun
from training.data import DataConfig, read_prompts


def require_room(run: StageRun, tokenizer: Tokenizer, data: DataConfig, max_new_tokens: int) -> None:
    """Check that every prompt leaves room for a response.

    Raises: ValueError naming the prompt, or file, line and field of a row that is no prompt.
    """
    room = run.model.max_position_embeddings - max_new_tokens
    for prompt in read_prompts(data):
        num_tokens = len(tokenizer.encode_prompt(prompt.messages))
        if num_tokens > room:
            raise ValueError(
                f"{data.source}: prompt {prompt.prompt_id!r} has {num_tokens} tokens; at most {room} leave room in"
                f" model.max_position_embeddings for {run.name}.max_new_tokens = {max_new_tokens}"
            )
