"""Special tokens and chat templates of widely used models, as their published files have them.

`Published.specials` are the special tokens in the order of their numbers, `closes` is the token that ends an
assistant's turn, and `stops` are all tokens that end a response.
"""

from dataclasses import dataclass, field
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA_3 = (
    "{{ bos_token }}\n{%- if messages[0]['role'] == 'system' -%}\n    {%- if messages[0]['content'] is string -%}\n"
    "        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}\n    {%- else -%}\n"
    "        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}\n    {%- endif -%}\n"
    '    {%- set loop_messages = messages[1:] -%}\n{%- else -%}\n    {%- set first_user_prefix = "" -%}\n'
    "    {%- set loop_messages = messages -%}\n{%- endif -%}\n{%- for message in loop_messages -%}\n"
    "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
    '        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}\n'
    "    {%- endif -%}\n    {%- if (message['role'] == 'assistant') -%}\n        {%- set role = \"model\" -%}\n"
    "    {%- else -%}\n        {%- set role = message['role'] -%}\n    {%- endif -%}\n"
    "    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else \"\") }}\n"
    "    {%- if message['content'] is string -%}\n        {{ message['content'] | trim }}\n"
    "    {%- elif message['content'] is iterable -%}\n        {%- for item in message['content'] -%}\n"
    "            {%- if item['type'] == 'image' -%}\n                {{ '<start_of_image>' }}\n"
    "            {%- elif item['type'] == 'text' -%}\n                {{ item['text'] | trim }}\n"
    "            {%- endif -%}\n        {%- endfor -%}\n    {%- else -%}\n"
    '        {{ raise_exception("Invalid content type") }}\n    {%- endif -%}\n'
    "    {{ '<end_of_turn>\n' }}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n"
    "    {{'<start_of_turn>model\n'}}\n{%- endif -%}\n"
)
PHI_4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}"
    "{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'user') %}"
    "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
QWEN_3 = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
# Shortened: without tools, and with its check of a message's channels.
HARMONY = (
    "{%- macro build_system_message() -%}\n"
    "    {%- if model_identity is not defined %}\n"
    '        {%- set model_identity = "You are ChatGPT, a large language model trained by OpenAI." %}\n'
    "    {%- endif %}\n"
    '    {{- model_identity + "\\n" }}\n    {{- "Knowledge cutoff: 2024-06\\n" }}\n'
    '    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}\n'
    "    {%- if reasoning_effort is not defined %}\n"
    '        {%- set reasoning_effort = "medium" %}\n'
    "    {%- endif %}\n"
    '    {{- "Reasoning: " + reasoning_effort + "\\n\\n" }}\n'
    '    {{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}\n'
    "{%- endmacro -%}\n"
    '{{- "<|start|>system<|message|>" }}\n{{- build_system_message() }}\n{{- "<|end|>" }}\n'
    '{%- if messages[0].role == "developer" or messages[0].role == "system" %}\n'
    "    {%- set developer_message = messages[0].content %}\n    {%- set loop_messages = messages[1:] %}\n"
    '{%- else %}\n    {%- set developer_message = "" %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n'
    "{%- if developer_message %}\n"
    '    {{- "<|start|>developer<|message|># Instructions\\n\\n" + developer_message + "\\n\\n<|end|>" }}\n'
    "{%- endif %}\n{%- set last_tool_call = namespace(name=none) %}\n"
    "{%- for message in loop_messages -%}\n    {%- if message.role == 'assistant' -%}\n"
    '        {%- if "<|channel|>analysis<|message|>" in message.content %}\n'
    '            {{- raise_exception("You have passed a message containing <|channel|> tags.") }}\n'
    "        {%- endif %}\n"
    "        {%- if loop.last and not add_generation_prompt %}\n"
    '            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}\n'
    "        {%- else %}\n"
    '            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}\n'
    "            {%- set last_tool_call.name = none %}\n        {%- endif %}\n"
    "    {%- elif message.role == 'user' -%}\n"
    '        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}\n'
    "    {%- endif -%}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n<|start|>assistant\n{%- endif -%}\n"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
OLMO_2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
GRANITE_3 = (
    "{% for message in messages %}{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content']"
    " + '<|end_of_text|>\n' }}{% if loop.last and add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}{% endfor %}"
)
VICUNA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# What `tokenizer_config.json` held by transformers 4 for a token that was stored as an object.
LLAMA_EOS_OBJECT = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True, "rstrip": False}


@dataclass(frozen=True)
class Published:
    specials: tuple[str, ...]
    tokens: dict[str, Any]  # of tokenizer_config.json
    stops: tuple[str, ...]
    closes: str = ""  # empty: the first of `stops`
    template: Any = None  # chat_template; None = the model has none
    generation: tuple[str, ...] = ()  # the tokens that generation_config.json ends with; empty = it has none
    system: bool = True  # whether the template takes a system turn
    config: dict[str, Any] = field(default_factory=dict)  # of config.json


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = ("<unk>", "<s>", "</s>")
_LLAMA_3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip

PUBLISHED: dict[str, Published] = {
    "openai-community/gpt2": Published(
        ("<|endoftext|>",),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        ("<|endoftext|>",),
    ),
    "EleutherAI/pythia-1b": Published(
        ("<|endoftext|>", "<|padding|>"),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        ("<|endoftext|>",),
    ),
    "meta-llama/Llama-2-7b-chat-hf": Published(
        _LLAMA,
        {"bos_token": {**LLAMA_EOS_OBJECT, "content": "<s>"}, "eos_token": LLAMA_EOS_OBJECT, "pad_token": None},
        ("</s>",),
        template=LLAMA_2,
        generation=("</s>",),
        system=False,
    ),
    "lmsys/vicuna-7b-v1.5": Published(
        _LLAMA, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}, ("</s>",), template=VICUNA,
        generation=("</s>",), system=False,
    ),
    "meta-llama/Meta-Llama-3-8B": Published(
        _LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, ("<|end_of_text|>",),
        generation=("<|end_of_text|>",),
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": Published(
        _LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, ("<|eot_id|>", "<|end_of_text|>"),
        template=LLAMA_3, generation=("<|end_of_text|>", "<|eot_id|>"),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Published(
        _LLAMA_3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), template=LLAMA_3,
        generation=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": Published(
        _LLAMA_3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>"},
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), template=LLAMA_3,
        config={"eos_token_id": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")},
    ),
    "mistralai/Mistral-7B-v0.1": Published(
        _LLAMA, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "unk_token": "<unk>"}, ("</s>",),
        generation=("</s>",),
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": Published(
        _LLAMA, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "unk_token": "<unk>"}, ("</s>",),
        template=MISTRAL, generation=("</s>",), system=False,
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": Published(
        (*_LLAMA, "[INST]", "[/INST]", "<pad>"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        ("</s>",), template=[{"name": "default", "template": MISTRAL}, {"name": "tool_use", "template": MISTRAL}],
        system=False,
    ),
    "HuggingFaceH4/zephyr-7b-beta": Published(
        _LLAMA, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}, ("</s>",), template=ZEPHYR,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Published(
        _LLAMA, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}, ("</s>",),
        template=ZEPHYR, generation=("</s>",),
    ),
    "Qwen/Qwen2.5-0.5B": Published(
        _IM, {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        ("<|im_end|>", "<|endoftext|>"), template=CHATML_WITH_DEFAULT_SYSTEM, generation=("<|endoftext|>",),
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Published(
        _IM, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ("<|im_end|>", "<|endoftext|>"), template=CHATML_WITH_DEFAULT_SYSTEM,
        generation=("<|im_end|>", "<|endoftext|>"),
    ),
    "Qwen/Qwen3-0.6B": Published(
        _IM, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ("<|im_end|>", "<|endoftext|>"), template=QWEN_3, generation=("<|im_end|>", "<|endoftext|>"),
    ),
    "HuggingFaceTB/SmolLM2-135M": Published(
        _IM, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        ("<|endoftext|>",), generation=("<|endoftext|>",),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Published(
        _IM, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, ("<|im_end|>",),
        template=CHATML_WITH_DEFAULT_SYSTEM, generation=("<|im_end|>",),
    ),
    "01-ai/Yi-1.5-6B-Chat": Published(
        ("<unk>", "<|startoftext|>", *_IM), {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>",
        "pad_token": "<unk>"}, ("<|im_end|>",), template=CHATML, generation=("<|im_end|>",),
    ),
    "microsoft/Phi-3-mini-4k-instruct": Published(
        (*_LLAMA, "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        ("<|end|>", "<|endoftext|>", "<|assistant|>"), template=PHI_3,
        generation=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "google/gemma-2-2b-it": Published(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, ("<end_of_turn>", "<eos>"), template=GEMMA,
        generation=("<eos>", "<end_of_turn>"), system=False,
    ),
    "google/gemma-3-1b-it": Published(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, ("<end_of_turn>", "<eos>"),
        template=GEMMA_3, generation=("<eos>", "<end_of_turn>"),
    ),
    "microsoft/phi-4": Published(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|dummy_85|>"),
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|dummy_85|>"},
        ("<|im_end|>", "<|endoftext|>"), template=PHI_4, generation=("<|endoftext|>", "<|im_end|>"),
    ),
    "openai/gpt-oss-20b": Published(
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
         "<|message|>", "<|call|>"),
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        ("<|return|>", "<|endoftext|>", "<|call|>"), template=HARMONY,
        generation=("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "google-t5/t5-small": Published(
        ("<pad>", "</s>", "<unk>", "<extra_id_0>"), {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
        ("</s>",), generation=("</s>",),
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Published(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
        "pad_token": "<｜end▁of▁sentence｜>"}, ("<｜end▁of▁sentence｜>",), template=DEEPSEEK,
        generation=("<｜end▁of▁sentence｜>",), system=False,
    ),
    "allenai/OLMo-2-0425-1B-Instruct": Published(
        ("<|endoftext|>", "<|pad|>"),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}, ("<|endoftext|>",),
        template=OLMO_2,
    ),
    "ibm-granite/granite-3.1-2b-instruct": Published(
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
        {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"},
        ("<|end_of_text|>",), template=GRANITE_3,
    ),
    "facebook/opt-125m": Published(
        ("<s>", "<pad>", "</s>", "<unk>"), {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}, ("</s>",),
        generation=("</s>",),
    ),
    "a Mistral in ChatML, whose padding token was never added": Published(
        (*_LLAMA, "<|im_start|>", "<|im_end|>"), {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "[PAD]"},
        ("<|im_end|>",), template=CHATML,
    ),
    "a Llama whose tokenizer names no end token": Published(
        _LLAMA_3, {"bos_token": "<|begin_of_text|>"}, ("<|eot_id|>", "<|end_of_text|>"), template=LLAMA_3,
        config={"eos_token_id": ("<|end_of_text|>", "<|eot_id|>")},
    ),
}  # fmt: skip
