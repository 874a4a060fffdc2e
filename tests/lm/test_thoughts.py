"""Templates of models that think: what is learned follows the tokens that a policy would be given."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from files.atomic import write_jsonl
from lm.tokenizer import Tokenizer
from sft.demonstrations import Limit, demonstration_lengths, demonstration_parts
from tests.lm.vocabularies import KINDS, PAD, START
from training.data import DataConfig

# As Qwen3.5's: the prompt opens thoughts or, if they are turned off, holds empty ones; of earlier responses only the
# answers are written.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% if loop.last %}{{ '<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1].strip()"
    " if '</think>' in m.content else '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As DeepSeek-R1's: the prompt opens thoughts, which are never written.
UNWRITTEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1].strip() }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# As Gemma 4's and Command R7B's: the prompt, which the second one writes after everything, has empty thoughts, and no
# response has any.
EMPTY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<|channel>thought\n<channel|>' }}{% endif %}"
)
ALWAYS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}<|START_RESPONSE|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}{{ '<|im_start|>assistant<|START_THINKING|><|END_THINKING|>' }}"
)
FIRST = [
    {"role": "user", "content": "The fox?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nthe dog."},
]
BOTH = [
    *FIRST,
    {"role": "user", "content": "The bird?"},
    {"role": "assistant", "content": "<think>\nAh.\n</think>\n\nthe bush."},
]
PLAIN = [{**message, "content": message["content"].rpartition("\n")[2]} for message in BOTH]


def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer(KINDS["qwen 2"](), pad=PAD, end="<|im_end|>", start=START, chat_template=template)


def texts(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    """What comes before each sequence's only response, and the response."""
    found = []
    for tokens, is_response in tokenizer.encode_responses([messages])[0]:
        first, stop = is_response.index(True), len(tokens) - is_response[::-1].index(True)
        assert all(is_response[first:stop])
        found.append((text_of(tokenizer, tokens[:first]), text_of(tokenizer, tokens[first:stop])))
    return found


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return "".join(map(tokenizer.token_text, tokens)).replace("Ġ", " ").replace("Ċ", "\n")


@pytest.mark.parametrize("template", [THINKING, UNWRITTEN])
def test_each_response_is_learned_once_after_the_prompt_that_a_policy_reads(template: str) -> None:
    ours = tokenizer_of(template)
    (last_prompt, last), (first_prompt, first) = texts(ours, BOTH)
    assert first == "Hm.\n</think>\n\nthe dog.<|im_end|>"
    assert last == "Ah.\n</think>\n\nthe bush.<|im_end|>"
    assert first_prompt == ours.render(BOTH[:1], add_generation_prompt=True)
    assert last_prompt == ours.render(BOTH[:3], add_generation_prompt=True)
    assert first_prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert "Hm." not in last_prompt


def test_every_prompt_of_a_further_sequence_has_a_policys_tokens() -> None:
    """No special token ends a prompt here, so " the" would span it and its response. Thoughts in the second response
    put only that one into a further sequence, where the first one's prompt is cut all the same.
    """
    ours = tokenizer_of(
        "{% for m in messages %}{{ m.role + ': ' + (m.content if loop.last else m.content.split('</think>')[-1]) }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [*PLAIN[:3], {"role": "assistant", "content": "Ah.</think>the bush."}, *PLAIN[:2]]
    found = ours.encode_responses([messages])[0]
    starts = [[place for place, mine in enumerate(marks) if mine and not marks[place - 1]] for _, marks in found]
    assert list(map(len, starts)) == [2, 1]
    for (tokens, _), places, asked in zip(found, starts, ((1, 5), (3,)), strict=True):
        for place, number in zip(places, asked, strict=True):
            assert tokens[:place] == ours.encode_prompt(messages[:number])
    prompt = ours.encode_prompt(PLAIN[:1])
    assert (
        found[1][0][: len(prompt)]
        == prompt
        != ours.encode_rendered(ours.render(PLAIN[:2], add_generation_prompt=False))[: len(prompt)]
    )


@pytest.mark.parametrize(("template", "begins"), [(EMPTY, ""), (ALWAYS, "<|START_RESPONSE|>")])
def test_a_response_follows_a_prompt_with_empty_thoughts(template: str, begins: str) -> None:
    ours = tokenizer_of(template)
    (last_prompt, last), (first_prompt, first) = texts(ours, PLAIN)
    assert (first, last) == (f"{begins}the dog.<|im_end|>", f"{begins}the bush.<|im_end|>")
    assert first_prompt == ours.render(PLAIN[:1], add_generation_prompt=True)
    assert last_prompt == ours.render(PLAIN[:3], add_generation_prompt=True)
    with pytest.raises(ValueError, match="a template must only append"):  # as if the question were not in it
        tokenizer_of(template.replace("m.content", "m.content[::loop.length]")).encode_conversation(PLAIN[:2])


def test_a_prompt_that_opens_thoughts_wants_them() -> None:
    with pytest.raises(ValueError, match=r"only append when a message is added \(the prompt opens thoughts, which the"):
        tokenizer_of(UNWRITTEN).encode_conversation(PLAIN[:2])


@pytest.mark.parametrize("content", ["Hm.\n</think>\n\nd", "<think>Hm.\n</think>\n\nd", "<think>\nHm.\n</think>"])
def test_thoughts_are_given_as_sampled_or_whole(content: str) -> None:
    messages = [FIRST[0], {"role": "assistant", "content": content}]
    ((before, said),) = texts(tokenizer_of(UNWRITTEN), messages)
    assert before == tokenizer_of(UNWRITTEN).render(FIRST[:1], add_generation_prompt=True)
    assert said == content.removeprefix("<think>").removeprefix("\n") + "<|im_end|>"


def test_only_the_last_response_of_a_comparison_has_to_follow_its_prompt() -> None:
    tokens, is_response = tokenizer_of(UNWRITTEN).encode_conversation([*PLAIN[:3], BOTH[3]])
    said = [token for token, mine in zip(tokens, is_response, strict=True) if mine]
    assert text_of(tokenizer_of(UNWRITTEN), said) == "Ah.\n</think>\n\nthe bush.<|im_end|>"


def test_thoughts_are_turned_off_in_the_template_itself(tmp_path: Path) -> None:
    ours = tokenizer_of(THINKING).with_template("non-thinking")
    assert ours.with_template("non-thinking") == ours
    (last_prompt, last), (first_prompt, first) = texts(ours, PLAIN)
    assert (first, last) == ("the dog.<|im_end|>", "the bush.<|im_end|>")
    assert first_prompt.endswith("<think>\n\n</think>\n\n")
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(PLAIN[:3], add_generation_prompt=True, tokenize=False) == last_prompt
    with pytest.raises(ValueError, match=r'"non-thinking": the model\'s own chat template has no enable_thinking'):
        tokenizer_of(UNWRITTEN).with_template("non-thinking")


@pytest.mark.parametrize("template", [THINKING, UNWRITTEN])
def test_others_answer_a_turn_whose_thoughts_the_template_drops(template: str) -> None:
    ours = tokenizer_of(template)
    reply = text_of(ours, ours.encode_reply([{"role": "user", "content": "fox"}]))
    assert reply.lstrip("\n").startswith("<|im_start|>user\nfox<|im_end|>")
    assert reply.endswith("<|im_start|>assistant\n<think>\n")


def test_a_conversation_is_as_many_rows_as_it_needs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"messages": BOTH}, {"messages": FIRST}])
    ours, data = tokenizer_of(THINKING), [DataConfig(source=str(tmp_path / "a.jsonl"))]
    limit = Limit(has_source=False, seq_len=1000)
    part, *_ = demonstration_parts(ours, data, limit, 0)
    assert part.arrays["lengths"].tolist() == [
        len(tokens) for messages in (BOTH, FIRST) for tokens, _ in ours.encode_responses([messages])[0]
    ]
    lengths = demonstration_lengths(ours, data, limit)
    assert (lengths.num_rows, lengths.spread) == (3, tuple(part.arrays["lengths"].tolist()))
