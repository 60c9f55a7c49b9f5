"""Makes tests/golden/chats.json: prompts and masks of published chat templates by transformers.

Run it in an environment of its own (it needs transformers, which megajax does not):

    python -m venv hf && hf/bin/pip install transformers
    hf/bin/python tests/golden/make_chats.py

The templates are those of the tokenizers that `SOURCES` names, some without the branches that no
case here reaches. For the masks each gets {% generation %} blocks around what the model writes; the
script asserts that this changes no text. The tokenizer is a small byte-level BPE that has the
control tokens of all templates. Made with transformers 5.24.0.
"""

import json
import pathlib
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FILE = pathlib.Path(__file__).with_name("chats.json")

CHATML = (
    r"{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    r"{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    r"Face<|im_end|>\n' }}{% endif %}"
    r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    r"{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    r"'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    r"+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    r"{{ content }}{% endfor %}{% if add_generation_prompt %}"
    r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    r"{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    r"(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    r"user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}"
    r"{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    r"{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant "
    r"roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    r"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    r"supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != "
    r"(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    r"user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}"
    r"{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    r"{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    r"{{ '<|user|>\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'system' %}\n"
    r"{{ '<|system|>\n' + message['content'] + eos_token }}"
    "\n{% elif message['role'] == 'assistant' %}\n"
    r"{{ '<|assistant|>\n'  + message['content'] + eos_token }}"
    "\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
    "{% endif %}\n{% endfor %}"
)
PHI3 = (
    r"{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
    r"message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
    r"message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    r"{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- content }}
            {%- endif %}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""  # noqa: E501

# (Llama 3 and Qwen2, their tokenizer.json) pieces that are encoded on their own.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Whose tokenizers have these templates, and their bos_token and eos_token.
SOURCES = {
    "chatml": ("HuggingFaceTB/SmolLM2-135M-Instruct", CHATML, "<|im_start|>", "<|im_end|>"),
    "llama3": (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": ("mistralai/Mistral-7B-Instruct-v0.2", MISTRAL, "<s>", "</s>"),
    "gemma": ("google/gemma-2-2b-it", GEMMA, "<bos>", "<eos>"),
    "zephyr": ("HuggingFaceH4/zephyr-7b-beta", ZEPHYR, "<s>", "</s>"),
    "phi3": ("microsoft/Phi-3-mini-4k-instruct", PHI3, "<s>", "<|endoftext|>"),
    "qwen3": ("Qwen/Qwen3-0.6B", QWEN3, None, "<|im_end|>"),
}
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> "
    "<|eot_id|> <s> </s> <bos> <eos> <start_of_turn> <end_of_turn> <|end|> <|user|> <|assistant|> "
    "<|system|>"
).split()
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]  # not special

# What the model writes, put between blocks: (part of the template, the same with blocks).
OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
MARKS = {
    "chatml": [
        (
            r"{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
            r"'<|im_end|>' + '\n'}}",
            r"{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
            + OPEN
            + r"{{message['content'] + '<|im_end|>'}}"
            + CLOSE
            + r"{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}",
        )
    ],
    "llama3": [
        (
            r"{{ content }}",
            r"{% if message['role'] == 'assistant' %}{{ content.split('\n\n')[0] + '\n\n' }}"
            + OPEN
            + r"{{ message['content'] | trim + '<|eot_id|>' }}"
            + CLOSE
            + r"{% else %}{{ content }}{% endif %}",
        )
    ],
    "mistral": [
        (
            r"{{ message['content'] + eos_token}}",
            OPEN + r"{{ message['content'] + eos_token}}" + CLOSE,
        )
    ],
    "gemma": [
        (
            r"{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
            r"'<end_of_turn>\n' }}",
            r"{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}"
            + OPEN
            + r"{{ message['content'] | trim + '<end_of_turn>' }}"
            + CLOSE
            + r"{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}",
        )
    ],
    "zephyr": [
        (
            r"{{ '<|assistant|>\n'  + message['content'] + eos_token }}",
            r"{{ '<|assistant|>\n' }}"
            + OPEN
            + "{{ message['content'] + eos_token }}"
            + CLOSE
            + "\n",
        )
    ],
    "phi3": [
        (
            r"{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}",
            r"{{'<|assistant|>\n'}}"
            + OPEN
            + r"{{message['content'] + '<|end|>'}}"
            + CLOSE
            + r"{{'\n'}}",
        )
    ],
    "qwen3": [
        (
            r"""{{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0""",
            r"""{{- '<|im_start|>' + message.role + '\n' }}
        {%- generation %}
        {%- if loop.index0""",
        ),
        (
            r"""{{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}""",
            r"""{{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == "tool" %}""",
        ),
    ],
}


def said(*texts, **more):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} | more for i, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": "Answer in one word."}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 2, "b": [3, "é"]}}}
TWO = said("What is 2 + 3?", "Five.", "And 4 + 4?", "It is eight, of course.")
THREE = [*said(" A word\nof two lines? ", "Ja ✓", "1", "2 "), *said("hello  world", "the\n\nend")]
CASES = {
    "two": (TWO, {}),
    "three": (THREE, {}),
    "system": ([SYSTEM, *TWO], {}),
    "thinking": (
        [
            *said("Why?"),
            {"role": "assistant", "content": "So.", "reasoning_content": "A thought.\nTwo."},
            *said("How?"),
            {"role": "assistant", "content": "Thus.", "reasoning_content": "Hm."},
        ],
        {},
    ),
    "tools": (
        [
            *said("2 + 3?"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ],
        {"tools": TOOLS},
    ),
}
OF = {"thinking": ("qwen3",), "tools": ("qwen3",), "system": ("chatml", "llama3", "zephyr", "phi3")}


def tokenizer():
    """A small byte-level BPE with the control tokens of all templates."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["system user assistant model hello world the\n\nend of course [INST] [/INST]"] * 9
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    return made


def main():
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        text = tokenizer().to_str()
        pathlib.Path(file.name).write_text(text)
        templates = {}
        for name, (source, template, bos, eos) in SOURCES.items():
            words = {k: v for k, v in (("bos_token", bos), ("eos_token", eos)) if v}
            fast = PreTrainedTokenizerFast(tokenizer_file=file.name, **words)
            marked = template
            for part, blocks in MARKS[name]:
                assert marked.count(part) == 1, (name, part)
                marked = marked.replace(part, blocks)
            cases = {}
            for case, (messages, more) in CASES.items():
                if name not in OF.get(case, (name,)):
                    continue
                apply = fast.apply_chat_template
                written = apply(messages, chat_template=template, tokenize=False, **more)
                assert written == apply(messages, chat_template=marked, tokenize=False, **more)
                answers = []
                for i, message in enumerate(messages):
                    if message["role"] != "assistant":
                        continue
                    prompt = apply(
                        messages[:i],
                        chat_template=template,
                        tokenize=False,
                        add_generation_prompt=True,
                        **more,
                    )
                    both = apply(
                        messages[: i + 1],
                        chat_template=marked,
                        return_dict=True,
                        return_assistant_tokens_mask=True,
                        **more,
                    )
                    mask = "".join(map(str, both["assistant_masks"]))
                    answers.append({"prompt": prompt, "ids": both["input_ids"], "mask": mask})
                cases[case] = {"text": written, "answers": answers}
            templates[name] = {"of": source, "template": template, **words, "cases": cases}
    made = {
        "tokenizer": json.loads(text),
        "messages": {name: {"messages": m, "more": more} for name, (m, more) in CASES.items()},
        "templates": templates,
    }
    FILE.write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
