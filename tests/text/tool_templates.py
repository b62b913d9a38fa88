"""Chat templates with tools, each written in the manner of one family's."""

from __future__ import annotations

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call return <tool_call>{"name": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen2.5."""

THINKING_TOOLS = (
    HERMES.replace(
        "{%- for message in messages %}",
        """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}""",
        1,
    )
    .replace(
        """           or (message.role == 'assistant' and not message.tool_calls) %}""",
        "    %}",
    )
    .replace(
        """        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}""",
        """        {%- set content = message.content if message.content is string else '' %}
        {%- set thought = message.reasoning_content if message.reasoning_content else '' %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '\\n<think>\\n' + thought + '\\n</think>\\n' }}
        {%- endif %}
        {{- '\\n' + content }}""",
    )
)
"""Qwen3: what was thought stays only behind the user's last message."""

LLAMA31 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format '
        + '{"name": function name, "parameters": dictionary of argument name and its value}.\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings of length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
"""The tools stand before the user's last message."""

DEEPSEEK = """{%- set ns = namespace(is_tool=false) -%}
{{ bos_token }}
{%- if tools %}{{ '# Tools\\n' + (tools | tojson) }}{% endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set ns.is_tool = false -%}{{ '<|user|>' + message.content }}
  {%- elif message.role == 'assistant' and message.tool_calls -%}
    {{- '<|assistant|>' + (message.content or '') + '<｜tool▁calls▁begin｜>' }}
    {%- for call in message.tool_calls -%}
      {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
      {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
    {%- endfor -%}
    {{- '<｜tool▁calls▁end｜></s>' }}
    {%- set ns.is_tool = false -%}
  {%- endif -%}
  {%- if message.role == 'assistant' and message.content is not none -%}
    {{- '<|assistant|>' + message.content + '</s>' }}
  {%- endif -%}
  {%- if message.role == 'tool' -%}
    {%- set ns.is_tool = true -%}{{ '<|output|>' + message.content + '<|/output|>' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}"""
"""Arguments are text, and a content beside calls is written twice."""

LFM2 = """{{- bos_token -}}
{%- set system = namespace(text='') -%}
{%- if messages[0].role == 'system' -%}
  {%- set system.text = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
  {%- set system.text = system.text + '\\nList of tools: [' + (tools | map('tojson') | join(', '))
      + ']' -%}
{%- endif -%}
{%- if system.text -%}
  {{- '<|im_start|>system\\n' + system.text + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content -%}
  {%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.role == 'tool' -%}
    {%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}
  {%- elif message.tool_calls -%}
    {{- '<|tool_call_start|>' + (message.tool_calls | map(attribute='function') | list | tojson)
        + '<|tool_call_end|>' -}}
  {%- endif -%}
  {{- content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""A content that is null is written as such."""

TOOL_TEMPLATES = {
    "hermes": (HERMES, "<|im_end|>", None),
    "thinking_tools": (THINKING_TOOLS, "<|im_end|>", None),
    "llama31": (LLAMA31, "<|eot_id|>", "<s>"),
    "mistral": (MISTRAL, "</s>", "<s>"),
    "deepseek": (DEEPSEEK, "</s>", "<s>"),
    "lfm2": (LFM2, "<|im_end|>", "<s>"),
}

TOOL_SPECIALS = (
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|output|>",
    "<|/output|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
