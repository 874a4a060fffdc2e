"""Chat templates with a place for tools. They write what the templates of published models write.

Each is shortened to what it writes for one row of tools, with objects as arguments. `source` is the published file.
"""

from dataclasses import dataclass

from tokenizers import AddedToken

from lm.tokenizer import Tokenizer
from tests.lm.vocabularies import LLAMA_3, QWEN_2, byte_level

_QWEN_TOOLS = (
    r"""{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with"""
    r""" function signatures within <tools></tools> XML tags:\n<tools>' }}{% for tool in tools %}"""
    r"""{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>\n\nFor each function call, return a json object with"""
    r""" function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>,"""
    r""" "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}"""
)
_QWEN_RESULT = (
    r"""{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"""
    r"""{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"""
    r"""{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""
)
_CALL = (
    r"""<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson"""
    r""" + '}"""
)

QWEN_2_5 = (
    r"""{% set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}"""
    r"""{% set has_system = messages[0].role == 'system' %}"""
    r"""{{ '<|im_start|>system\n' + (messages[0].content if has_system else default) }}"""
    rf"""{{% if tools %}}{{{{ '\n\n' }}}}{_QWEN_TOOLS}{{% else %}}{{{{ '<|im_end|>\n' }}}}{{% endif %}}"""
    r"""{% for message in messages %}{% if message.role == 'tool' %}"""
    rf"""{_QWEN_RESULT}{{% elif not (has_system and loop.first) %}}"""
    r"""{{ '<|im_start|>' + message.role + ('\n' + message.content if message.content or not message.tool_calls"""
    r""" else '') }}"""
    rf"""{{% for call in message.tool_calls or [] %}}{{{{ '\n{_CALL}\n</tool_call>' }}}}{{% endfor %}}"""
    r"""{{ '<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"""
    r""" }}{% endif %}"""
)
QWEN_3 = (
    r"""{% set system = messages[0].content if messages[0].role == 'system' else '' %}"""
    r"""{% if system or tools %}{{ '<|im_start|>system\n' + system }}{% endif %}"""
    r"""{% if tools %}{{ '\n\n' if system }}"""
    rf"""{_QWEN_TOOLS}{{% elif system %}}{{{{ '<|im_end|>\n' }}}}{{% endif %}}"""
    r"""{% set last = namespace(query=-1) %}{% for message in messages %}{% if message.role == 'user' %}"""
    r"""{% set last.query = loop.index0 %}{% endif %}{% endfor %}"""
    r"""{% for message in messages %}{% set content = message.content or '' %}{% if message.role == 'tool' %}"""
    rf"""{_QWEN_RESULT}{{% elif message.role == 'assistant' %}}"""
    r"""{% set thoughts = '' %}{% if '</think>' in content %}"""
    r"""{% set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"""
    r"""{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"""
    r"""{% if loop.index0 > last.query and (loop.last or thoughts) %}"""
    r"""{{ '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}{{ content }}"""
    r"""{% for call in message.tool_calls or [] %}{{ '\n' if content or not loop.first }}"""
    rf"""{{{{ '{_CALL}\n</tool_call>' }}}}{{% endfor %}}{{{{ '<|im_end|>\n' }}}}"""
    r"""{% elif not (message.role == 'system' and loop.first) %}"""
    r"""{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
    r"""{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)
LLAMA_3_1 = (
    r"""{{ bos_token }}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"""
    r"""{{ '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools is not none else '')"""
    r""" + 'Cutting Knowledge Date: December 2023\nToday Date: ' + (date_string or '26 Jul 2024') + '\n\n'"""
    r""" + (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}"""
    r"""{% if tools is not none %}{{ '<|start_header_id|>user<|end_header_id|>\n\nGiven the following"""
    r""" functions, please"""
    r""" respond with a JSON for a function call with its proper arguments that best answers the given"""
    r""" prompt.\n\nRespond"""
    r""" in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use"""
    r""" variables.\n\n' }}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}"""
    r"""{{ rest[0].content | trim + '<|eot_id|>' }}{% set rest = rest[1:] %}{% endif %}"""
    r"""{% for message in rest %}{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}"""
    r"""{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"""
    r"""{% set call = message.tool_calls[0].function %}{{"""
    r""" '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "'"""
    r""" + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}"""
    r"""{% elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content"""
    r""" | tojson"""
    r""" + '<|eot_id|>' }}{% else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'"""
    r""" + message.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"""
    r"""{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
)
MISTRAL_NEMO = (
    r"""{% set system = messages[0].content if messages[0].role == 'system' else '' %}"""
    r"""{% set rest = messages[1:] if system else messages %}{% set asked = rest | selectattr('role',"""
    r""" 'equalto', 'user') | list %}"""
    r"""{{ bos_token }}{% for message in rest %}{% if message.role == 'user' %}"""
    r"""{% if tools is not none and message == asked[-1] %}{{ '[AVAILABLE_TOOLS][' }}{% for tool in tools %}"""
    r"""{{ '{"type": "function", "function": {' }}{% for key, value in tool.function.items() %}"""
    r"""{{ '"' + key + '": ' + ('"' + value + '"' if value is string else value | tojson) }}{{ ', ' if not"""
    r""" loop.last }}"""
    r"""{% endfor %}{{ '}}' + (']' if loop.last else ', ') }}{% endfor %}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"""
    r"""{{ '[INST]' + (system + '\n\n' if system and loop.last else '') + message.content + '[/INST]' }}"""
    r"""{% elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS][' }}"""
    r"""{% for call in message.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"""
    r"""{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"""
    r"""{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}"""
    r"""{% endfor %}{% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% elif message.role"""
    r""" == 'tool' %}"""
    r"""{{ '[TOOL_RESULTS]{"content": ' + message.content + ', "call_id": "' + message.tool_call_id +"""
    r""" '"}[/TOOL_RESULTS]' }}"""
    r"""{% endif %}{% endfor %}"""
)
HERMES_3 = (
    r"""{% macro type_of(spec) %}{% set names = {'string': 'str', 'number': 'float', 'integer': 'int',"""
    r""" 'boolean': 'bool'} %}"""
    r"""{% if names[spec.type] is defined %}{{ names[spec.type] }}{% elif spec.type == 'object' %}{{ 'dict' }}"""
    r"""{% else %}{{ 'Any' }}{% endif %}{% endmacro %}{{ bos_token }}{{ '<|im_start|>system\nYou are a function"""
    r""" calling AI"""
    r""" model. You are provided with function signatures within <tools></tools> XML tags. You may call one or"""
    r""" more functions"""
    r""" to assist with the user query. Don\'t make assumptions about what values to plug into functions. Here"""
    r""" are the"""
    r""" available tools: <tools> ' }}{% for tool in tools %}{% set f = tool.function %}"""
    r"""{{ '{"type": "function", "function": {"name": "' + f.name + '", "description": "' + f.name + '(' }}"""
    r"""{% for name, spec in f.parameters.properties | items %}{{ name + ': ' + type_of(spec) + (', ' if not"""
    r""" loop.last else '') }}"""
    r"""{% endfor %}{{ ') - ' + f.description + '\n\n' }}{% for name, spec in f.parameters.properties | items %}"""
    r"""{{ '    Args:\n' if loop.first }}{{ '        ' + name + '(' + type_of(spec) + '): ' + spec.description"""
    r""" | trim }}"""
    r"""{% endfor %}{{ '", "parameters": ' + (f.parameters | tojson if f.parameters.properties else '{}') + '}'"""
    r""" + ('\n' if not loop.last else '') }}{% endfor %}"""
    r"""{{ ' </tools>Use the following pydantic model json schema for each tool call you will make:"""
    r""" {"properties": {"name":"""
    r""" {"title": "Name", "type": "string"}, "arguments": {"title": "Arguments", "type": "object"}},"""
    r""" "required": ["name","""
    r""" "arguments"], "title": "FunctionCall", "type": "object"}}\nFor each function call return a json object"""
    r""" with function"""
    r""" name and arguments within <tool_call></tool_call> XML tags as follows:\n<tool_call>\n{"name":"""
    r""" <function-name>,"""
    r""" "arguments": <args-dict>}\n</tool_call><|im_end|>\n' }}{% for message in messages %}{% if message.role"""
    r""" == 'tool' %}"""
    r"""{{ '<|im_start|>tool\n' if loop.previtem.role != 'tool' }}{{ '<tool_response>\n' + message.content"""
    r""" + '\n</tool_response>' + ('\n' if not loop.last else '') }}"""
    r"""{{ '<|im_end|>' if loop.last or loop.nextitem.role != 'tool' }}"""
    r"""{% elif message.tool_calls is defined %}{{ '<|im_start|>' + message.role }}{% for call in"""
    r""" message.tool_calls %}"""
    rf"""{{{{ '\n{_CALL}\n</tool_call>' }}}}{{% endfor %}}{{{{ '<|im_end|>\n' }}}}"""
    r"""{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{%"""
    r""" endfor %}"""
    r"""{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)


@dataclass(frozen=True)
class ToolTemplate:
    """A template, the special tokens and the other added tokens that it writes, and how its vocabulary splits text."""

    source: str
    text: str
    end: str
    specials: tuple[str, ...]
    added: tuple[str, ...] = ()
    split: str = QWEN_2
    start: str = ""

    def tokenizer(self) -> Tokenizer:
        """A small vocabulary with these tokens."""
        vocabulary = byte_level(split=self.split)
        vocabulary.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.specials])
        vocabulary.add_tokens([AddedToken(name, special=False, normalized=False) for name in self.added])
        return Tokenizer(vocabulary, end=self.end, start=self.start, chat_template=self.text)


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>",
    "<|reserved_special_token_0|>",
)  # fmt: skip
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
TOOL_TEMPLATES = {
    "Qwen2.5": ToolTemplate(
        "Qwen/Qwen2.5-7B-Instruct: tokenizer_config.json", QWEN_2_5, "<|im_end|>",
        (*_CHATML, "<|object_ref_start|>", "<|object_ref_end|>"), _TAGS[:2],
    ),
    "Qwen3": ToolTemplate("Qwen/Qwen3-0.6B: tokenizer_config.json", QWEN_3, "<|im_end|>", _CHATML, _TAGS),
    "Llama 3.1": ToolTemplate(
        "meta-llama/Llama-3.1-8B-Instruct (and 3.2): tokenizer_config.json", LLAMA_3_1, "<|eot_id|>", _LLAMA,
        split=LLAMA_3, start="<|begin_of_text|>",
    ),
    "Mistral": ToolTemplate(
        "mistralai/Mistral-Nemo-Instruct-2407: tokenizer_config.json", MISTRAL_NEMO, "</s>", _MISTRAL, split=LLAMA_3,
        start="<s>",
    ),
    "Hermes": ToolTemplate(
        "NousResearch/Hermes-3-Llama-3.1-8B: tokenizer_config.json, tool_use", HERMES_3, "<|im_end|>",
        ("<|begin_of_text|>", *_CHATML), _TAGS[:4], split=LLAMA_3, start="<|begin_of_text|>",
    ),
}  # fmt: skip
