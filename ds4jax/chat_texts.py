"""Fixed texts of the DeepSeek-V4 prompt format; constants only, no logic.

They were published by DeepSeek under the MIT licence together with the weights and are part of the
protocol: a single changed character changes the model's input. `ds4jax.chat` puts them together.
"""

from __future__ import annotations

EFFORT_A = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem "
    "to resolve the root cause, rigorously stress-testing your logic against all potential "
    "paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate "
    "step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked.\n"
    "\n"
)
"""Reasoning effort `high` of the 0731 profile, `max` of the preview profile."""

EFFORT_B = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to "
    "chance: exhaustively decompose the problem into its most fundamental components, "
    "trace every causal chain to its root, and resolve the underlying cause rather than "
    "any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from "
    "multiple angles and are certain that no assumption remains unchecked and no error "
    "remains undiscovered.\n"
    "\n"
)
"""Reasoning effort `max` of the 0731 profile."""

EFFORT_V41 = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the "
    "reasoning)\n"
    "\n"
)
"""Effort line of V4.1; `{effort}` is an integer from 1 to 100."""

TOOLS_BLOCK_V4 = (
    "## Tools\n"
    "\n"
    "You have access to a set of tools to help answer the user's question. You can invoke "
    'tools by writing a "<｜DSML｜tool_calls>" block like the following:\n'
    "\n"
    "<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="$TOOL_NAME">\n'
    '<｜DSML｜parameter name="$PARAMETER_NAME" '
    'string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="$TOOL_NAME2">\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>\n"
    "\n"
    'String parameters should be specified as is and set `string="true"`. For all other '
    "types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
    '`string="false"`.\n'
    "\n"
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete "
    "reasoning inside <think>...</think> BEFORE any tool calls or final response.\n"
    "\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n"
    "\n"
    "### Available Tool Schemas\n"
    "\n"
    "{tool_schemas}\n"
    "\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke "
    "tool calls.\n"
)
"""Tool declaration; `{tool_schemas}` is one line of JSON per tool. The markers in it are real."""

TOOLS_BLOCK_V41 = (
    TOOLS_BLOCK_V4.replace("｜DSML｜tool_calls", "｜DSML｜ calls")
    .replace("｜DSML｜invoke", "｜DSML｜ invoke")
    .replace("｜DSML｜parameter", "｜DSML｜ parameter")
)
"""The same with the tags of V4.1, which have a space after the marker."""

RESPONSE_SCHEMA = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)
"""Response format with a JSON schema; `{schema}` is one line of JSON."""

RESPONSE_JSON_OBJECT = (
    "You are a helpful assistant designed to output JSON.\n"
    "## Response Format:\n"
    "\n"
    "Reply with JSON object ONLY."
)
"""Response format of free JSON."""

TOOL_RESULT_OPEN, TOOL_RESULT_CLOSE = "<tool_result>", "</tool_result>"
"""Around each tool result; ordinary text, not markers."""
