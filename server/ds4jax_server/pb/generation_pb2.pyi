import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SystemPlacement(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYSTEM_PLACEMENT_UNSPECIFIED: _ClassVar[SystemPlacement]
    SYSTEM_PLACEMENT_FRONT: _ClassVar[SystemPlacement]
    SYSTEM_PLACEMENT_AS_USER: _ClassVar[SystemPlacement]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]

class Speculation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_UNSPECIFIED: _ClassVar[Speculation]
    SPECULATION_AUTO: _ClassVar[Speculation]
    SPECULATION_OFF: _ClassVar[Speculation]
    SPECULATION_REJECTION: _ClassVar[Speculation]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_TIME_LIMIT: _ClassVar[FinishReason]
SYSTEM_PLACEMENT_UNSPECIFIED: SystemPlacement
SYSTEM_PLACEMENT_FRONT: SystemPlacement
SYSTEM_PLACEMENT_AS_USER: SystemPlacement
PRIORITY_UNSPECIFIED: Priority
PRIORITY_LOW: Priority
PRIORITY_NORMAL: Priority
PRIORITY_HIGH: Priority
SPECULATION_UNSPECIFIED: Speculation
SPECULATION_AUTO: Speculation
SPECULATION_OFF: Speculation
SPECULATION_REJECTION: Speculation
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_TIME_LIMIT: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("model", "chat", "text", "tokens", "sampling", "stopping", "output", "response_format", "candidate_count", "request_id", "priority", "cache", "speculation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: ChatInput
    text: str
    tokens: TokenIds
    sampling: SamplingParams
    stopping: StoppingCriteria
    output: OutputOptions
    response_format: ResponseFormat
    candidate_count: int
    request_id: str
    priority: Priority
    cache: CacheOptions
    speculation: Speculation
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingCriteria, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., response_format: _Optional[_Union[ResponseFormat, _Mapping]] = ..., candidate_count: _Optional[int] = ..., request_id: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "thinking", "system_placement")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    thinking: Thinking
    system_placement: SystemPlacement
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., system_placement: _Optional[_Union[SystemPlacement, str]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "parts", "reasoning", "tool_calls", "tool_call_id", "prefix", "task")
    class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROLE_UNSPECIFIED: _ClassVar[Message.Role]
        ROLE_SYSTEM: _ClassVar[Message.Role]
        ROLE_USER: _ClassVar[Message.Role]
        ROLE_ASSISTANT: _ClassVar[Message.Role]
        ROLE_TOOL: _ClassVar[Message.Role]
        ROLE_LATEST_REMINDER: _ClassVar[Message.Role]
        ROLE_DEVELOPER: _ClassVar[Message.Role]
    ROLE_UNSPECIFIED: Message.Role
    ROLE_SYSTEM: Message.Role
    ROLE_USER: Message.Role
    ROLE_ASSISTANT: Message.Role
    ROLE_TOOL: Message.Role
    ROLE_LATEST_REMINDER: Message.Role
    ROLE_DEVELOPER: Message.Role
    class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TASK_UNSPECIFIED: _ClassVar[Message.Task]
        TASK_ACTION: _ClassVar[Message.Task]
        TASK_QUERY: _ClassVar[Message.Task]
        TASK_AUTHORITY: _ClassVar[Message.Task]
        TASK_DOMAIN: _ClassVar[Message.Task]
        TASK_TITLE: _ClassVar[Message.Task]
        TASK_READ_URL: _ClassVar[Message.Task]
    TASK_UNSPECIFIED: Message.Task
    TASK_ACTION: Message.Task
    TASK_QUERY: Message.Task
    TASK_AUTHORITY: Message.Task
    TASK_DOMAIN: Message.Task
    TASK_TITLE: Message.Task
    TASK_READ_URL: Message.Task
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    role: Message.Role
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    prefix: bool
    task: Message.Task
    def __init__(self, role: _Optional[_Union[Message.Role, str]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., prefix: _Optional[bool] = ..., task: _Optional[_Union[Message.Task, str]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json", "arguments_struct")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_STRUCT_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    arguments_struct: _struct_pb2.Struct
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., arguments_struct: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "name")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ToolChoice.Mode]
        MODE_AUTO: _ClassVar[ToolChoice.Mode]
        MODE_NONE: _ClassVar[ToolChoice.Mode]
        MODE_REQUIRED: _ClassVar[ToolChoice.Mode]
        MODE_NAMED: _ClassVar[ToolChoice.Mode]
    MODE_UNSPECIFIED: ToolChoice.Mode
    MODE_AUTO: ToolChoice.Mode
    MODE_NONE: ToolChoice.Mode
    MODE_REQUIRED: ToolChoice.Mode
    MODE_NAMED: ToolChoice.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoice.Mode
    name: str
    def __init__(self, mode: _Optional[_Union[ToolChoice.Mode, str]] = ..., name: _Optional[str] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("mode", "effort", "drop_thinking")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Thinking.Mode]
        MODE_ON: _ClassVar[Thinking.Mode]
        MODE_OFF: _ClassVar[Thinking.Mode]
    MODE_UNSPECIFIED: Thinking.Mode
    MODE_ON: Thinking.Mode
    MODE_OFF: Thinking.Mode
    class Effort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EFFORT_UNSPECIFIED: _ClassVar[Thinking.Effort]
        EFFORT_LOW: _ClassVar[Thinking.Effort]
        EFFORT_HIGH: _ClassVar[Thinking.Effort]
        EFFORT_MAX: _ClassVar[Thinking.Effort]
    EFFORT_UNSPECIFIED: Thinking.Effort
    EFFORT_LOW: Thinking.Effort
    EFFORT_HIGH: Thinking.Effort
    EFFORT_MAX: Thinking.Effort
    MODE_FIELD_NUMBER: _ClassVar[int]
    EFFORT_FIELD_NUMBER: _ClassVar[int]
    DROP_THINKING_FIELD_NUMBER: _ClassVar[int]
    mode: Thinking.Mode
    effort: Thinking.Effort
    drop_thinking: bool
    def __init__(self, mode: _Optional[_Union[Thinking.Mode, str]] = ..., effort: _Optional[_Union[Thinking.Effort, str]] = ..., drop_thinking: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_window", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PENALTY_WINDOW_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_window: int
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., penalty_window: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class StoppingCriteria(_message.Message):
    __slots__ = ("max_output_tokens", "min_output_tokens", "stop_strings", "stop_token_ids", "ignore_eos", "max_reasoning_tokens", "time_limit")
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    max_output_tokens: int
    min_output_tokens: int
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    max_reasoning_tokens: int
    time_limit: _duration_pb2.Duration
    def __init__(self, max_output_tokens: _Optional[int] = ..., min_output_tokens: _Optional[int] = ..., stop_strings: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., max_reasoning_tokens: _Optional[int] = ..., time_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("token_ids", "top_logprobs", "prompt_logprobs", "logprobs_after_sampling", "echo", "include_stop_string", "reasoning", "min_delta_interval", "progress_interval")
    class Reasoning(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASONING_UNSPECIFIED: _ClassVar[OutputOptions.Reasoning]
        REASONING_SEPARATE: _ClassVar[OutputOptions.Reasoning]
        REASONING_OMIT: _ClassVar[OutputOptions.Reasoning]
        REASONING_INLINE: _ClassVar[OutputOptions.Reasoning]
    REASONING_UNSPECIFIED: OutputOptions.Reasoning
    REASONING_SEPARATE: OutputOptions.Reasoning
    REASONING_OMIT: OutputOptions.Reasoning
    REASONING_INLINE: OutputOptions.Reasoning
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_AFTER_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    MIN_DELTA_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    token_ids: bool
    top_logprobs: int
    prompt_logprobs: bool
    logprobs_after_sampling: bool
    echo: bool
    include_stop_string: bool
    reasoning: OutputOptions.Reasoning
    min_delta_interval: _duration_pb2.Duration
    progress_interval: _duration_pb2.Duration
    def __init__(self, token_ids: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., logprobs_after_sampling: _Optional[bool] = ..., echo: _Optional[bool] = ..., include_stop_string: _Optional[bool] = ..., reasoning: _Optional[_Union[OutputOptions.Reasoning, str]] = ..., min_delta_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., progress_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResponseFormat(_message.Message):
    __slots__ = ("text", "json_object", "json_schema", "regex")
    class Text(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class JsonObject(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    text: ResponseFormat.Text
    json_object: ResponseFormat.JsonObject
    json_schema: _struct_pb2.Struct
    regex: str
    def __init__(self, text: _Optional[_Union[ResponseFormat.Text, _Mapping]] = ..., json_object: _Optional[_Union[ResponseFormat.JsonObject, _Mapping]] = ..., json_schema: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., regex: _Optional[str] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("mode", "session_id")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[CacheOptions.Mode]
        MODE_USE: _ClassVar[CacheOptions.Mode]
        MODE_BYPASS: _ClassVar[CacheOptions.Mode]
        MODE_READ_ONLY: _ClassVar[CacheOptions.Mode]
    MODE_UNSPECIFIED: CacheOptions.Mode
    MODE_USE: CacheOptions.Mode
    MODE_BYPASS: CacheOptions.Mode
    MODE_READ_ONLY: CacheOptions.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    mode: CacheOptions.Mode
    session_id: str
    def __init__(self, mode: _Optional[_Union[CacheOptions.Mode, str]] = ..., session_id: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "progress", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    progress: Progress
    delta: Delta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "chat_profile", "numerics", "prompt_tokens", "cached_tokens", "seed", "max_output_tokens", "queue_time")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_PROFILE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    chat_profile: str
    numerics: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    max_output_tokens: int
    queue_time: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., chat_profile: _Optional[str] = ..., numerics: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("state", "queue_position", "tokens_done", "tokens_total")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Progress.State]
        STATE_QUEUED: _ClassVar[Progress.State]
        STATE_PREFILL: _ClassVar[Progress.State]
        STATE_DECODE: _ClassVar[Progress.State]
    STATE_UNSPECIFIED: Progress.State
    STATE_QUEUED: Progress.State
    STATE_PREFILL: Progress.State
    STATE_DECODE: Progress.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    state: Progress.State
    queue_position: int
    tokens_done: int
    tokens_total: int
    def __init__(self, state: _Optional[_Union[Progress.State, str]] = ..., queue_position: _Optional[int] = ..., tokens_done: _Optional[int] = ..., tokens_total: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("candidate", "reasoning", "content", "tool_calls", "token_ids", "logprobs")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    reasoning: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, candidate: _Optional[int] = ..., reasoning: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "start", "arguments", "end")
    class Start(_message.Message):
        __slots__ = ("id", "name")
        ID_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        id: str
        name: str
        def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...
    class End(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: ToolCallDelta.Start
    arguments: str
    end: ToolCallDelta.End
    def __init__(self, index: _Optional[int] = ..., start: _Optional[_Union[ToolCallDelta.Start, _Mapping]] = ..., arguments: _Optional[str] = ..., end: _Optional[_Union[ToolCallDelta.End, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("candidate", "finish_reason", "stop_string", "stop_token_id", "tool_calls", "truncated_call", "usage", "timings", "speculation")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_CALL_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    truncated_call: str
    usage: Usage
    timings: Timings
    speculation: Speculation
    def __init__(self, candidate: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., truncated_call: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "draft_proposed_tokens", "draft_accepted_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    draft_proposed_tokens: int
    draft_accepted_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., draft_proposed_tokens: _Optional[int] = ..., draft_accepted_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue", "prefill", "first_token", "total")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    queue: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    first_token: _duration_pb2.Duration
    total: _duration_pb2.Duration
    def __init__(self, queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CountTokensRequest(_message.Message):
    __slots__ = ("model", "chat", "text", "tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: ChatInput
    text: str
    tokens: TokenIds
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class CountTokensResponse(_message.Message):
    __slots__ = ("prompt_tokens", "available_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    available_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., available_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "chat", "text", "parse_markers", "no_bos", "pieces")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_MARKERS_FIELD_NUMBER: _ClassVar[int]
    NO_BOS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    model: str
    chat: ChatInput
    text: str
    parse_markers: bool
    no_bos: bool
    pieces: bool
    def __init__(self, model: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., text: _Optional[str] = ..., parse_markers: _Optional[bool] = ..., no_bos: _Optional[bool] = ..., pieces: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "prompt", "pieces")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    prompt: str
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., prompt: _Optional[str] = ..., pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "display_name", "context_length", "vocab_size", "chat_profile", "numerics", "dtype", "quantisation", "digest", "approximate", "experts_per_token", "has_tokenizer", "default_sampling", "limits", "capabilities", "unqualified", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHAT_PROFILE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    APPROXIMATE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    UNQUALIFIED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    display_name: str
    context_length: int
    vocab_size: int
    chat_profile: str
    numerics: str
    dtype: str
    quantisation: str
    digest: str
    approximate: bool
    experts_per_token: int
    has_tokenizer: bool
    default_sampling: SamplingParams
    limits: Limits
    capabilities: Capabilities
    unqualified: bool
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., display_name: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., chat_profile: _Optional[str] = ..., numerics: _Optional[str] = ..., dtype: _Optional[str] = ..., quantisation: _Optional[str] = ..., digest: _Optional[str] = ..., approximate: _Optional[bool] = ..., experts_per_token: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., unqualified: _Optional[bool] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("lanes", "queue", "max_output_tokens", "max_receive_bytes", "max_send_bytes", "max_tools", "max_tool_bytes", "max_stop_strings", "max_stop_token_ids", "max_logit_bias", "max_top_logprobs", "max_candidates", "kv_pages", "prefill_chunk", "max_concurrent_streams")
    LANES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECEIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_STREAMS_FIELD_NUMBER: _ClassVar[int]
    lanes: int
    queue: int
    max_output_tokens: int
    max_receive_bytes: int
    max_send_bytes: int
    max_tools: int
    max_tool_bytes: int
    max_stop_strings: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_top_logprobs: int
    max_candidates: int
    kv_pages: int
    prefill_chunk: int
    max_concurrent_streams: int
    def __init__(self, lanes: _Optional[int] = ..., queue: _Optional[int] = ..., max_output_tokens: _Optional[int] = ..., max_receive_bytes: _Optional[int] = ..., max_send_bytes: _Optional[int] = ..., max_tools: _Optional[int] = ..., max_tool_bytes: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_candidates: _Optional[int] = ..., kv_pages: _Optional[int] = ..., prefill_chunk: _Optional[int] = ..., max_concurrent_streams: _Optional[int] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("chat", "tools", "logprobs", "prompt_logprobs", "constrained_decoding", "prefix_cache", "speculation", "priorities")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINED_DECODING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    chat: bool
    tools: bool
    logprobs: bool
    prompt_logprobs: bool
    constrained_decoding: bool
    prefix_cache: bool
    speculation: bool
    priorities: bool
    def __init__(self, chat: _Optional[bool] = ..., tools: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., prompt_logprobs: _Optional[bool] = ..., constrained_decoding: _Optional[bool] = ..., prefix_cache: _Optional[bool] = ..., speculation: _Optional[bool] = ..., priorities: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "model", "start_time", "status_time", "lanes_total", "lanes", "requests_queued", "requests_active", "pages_total", "pages_free", "counters", "last_decode_step", "last_prefill_step", "loading_stage", "loading_fraction", "configuration", "memory_plan")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[GetStatusResponse.State]
        STATE_LOADING: _ClassVar[GetStatusResponse.State]
        STATE_SERVING: _ClassVar[GetStatusResponse.State]
        STATE_UNHEALTHY: _ClassVar[GetStatusResponse.State]
        STATE_DRAINING: _ClassVar[GetStatusResponse.State]
    STATE_UNSPECIFIED: GetStatusResponse.State
    STATE_LOADING: GetStatusResponse.State
    STATE_SERVING: GetStatusResponse.State
    STATE_UNHEALTHY: GetStatusResponse.State
    STATE_DRAINING: GetStatusResponse.State
    class ConfigurationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class MemoryPlanEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    STATUS_TIME_FIELD_NUMBER: _ClassVar[int]
    LANES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_DECODE_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_PREFILL_STEP_FIELD_NUMBER: _ClassVar[int]
    LOADING_STAGE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FRACTION_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PLAN_FIELD_NUMBER: _ClassVar[int]
    state: GetStatusResponse.State
    model: str
    start_time: _timestamp_pb2.Timestamp
    status_time: _timestamp_pb2.Timestamp
    lanes_total: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    requests_queued: int
    requests_active: int
    pages_total: int
    pages_free: int
    counters: StatusCounters
    last_decode_step: _duration_pb2.Duration
    last_prefill_step: _duration_pb2.Duration
    loading_stage: str
    loading_fraction: float
    configuration: _containers.ScalarMap[str, str]
    memory_plan: _containers.ScalarMap[str, int]
    def __init__(self, state: _Optional[_Union[GetStatusResponse.State, str]] = ..., model: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., status_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., lanes_total: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., requests_queued: _Optional[int] = ..., requests_active: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., counters: _Optional[_Union[StatusCounters, _Mapping]] = ..., last_decode_step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_prefill_step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., loading_stage: _Optional[str] = ..., loading_fraction: _Optional[float] = ..., configuration: _Optional[_Mapping[str, str]] = ..., memory_plan: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StatusCounters(_message.Message):
    __slots__ = ("steps", "prefill_steps", "decode_steps", "rows_real", "rows_padded", "prefill_tokens", "output_tokens", "prefill_seconds", "decode_seconds", "wait_seconds", "dispatch_seconds", "host_seconds", "preemptions", "suspensions", "slow_clients", "non_finite", "watchdog", "device_errors", "self_tests", "requests", "drafts_proposed", "drafts_verified", "drafts_accepted", "spec_steps", "compiles", "compiles_after_ready", "compile_seconds", "host_syncs", "verified_at_depth", "accepted_at_depth", "host_cpu_seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_REAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_PADDED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SUSPENSIONS_FIELD_NUMBER: _ClassVar[int]
    SLOW_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    WATCHDOG_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    SELF_TESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPILES_FIELD_NUMBER: _ClassVar[int]
    COMPILES_AFTER_READY_FIELD_NUMBER: _ClassVar[int]
    COMPILE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOST_SYNCS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_DEPTH_FIELD_NUMBER: _ClassVar[int]
    HOST_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    prefill_steps: int
    decode_steps: int
    rows_real: int
    rows_padded: int
    prefill_tokens: int
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float
    wait_seconds: float
    dispatch_seconds: float
    host_seconds: float
    preemptions: int
    suspensions: int
    slow_clients: int
    non_finite: int
    watchdog: int
    device_errors: int
    self_tests: int
    requests: int
    drafts_proposed: int
    drafts_verified: int
    drafts_accepted: int
    spec_steps: int
    compiles: int
    compiles_after_ready: int
    compile_seconds: float
    host_syncs: int
    verified_at_depth: _containers.RepeatedScalarFieldContainer[int]
    accepted_at_depth: _containers.RepeatedScalarFieldContainer[int]
    host_cpu_seconds: float
    def __init__(self, steps: _Optional[int] = ..., prefill_steps: _Optional[int] = ..., decode_steps: _Optional[int] = ..., rows_real: _Optional[int] = ..., rows_padded: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., dispatch_seconds: _Optional[float] = ..., host_seconds: _Optional[float] = ..., preemptions: _Optional[int] = ..., suspensions: _Optional[int] = ..., slow_clients: _Optional[int] = ..., non_finite: _Optional[int] = ..., watchdog: _Optional[int] = ..., device_errors: _Optional[int] = ..., self_tests: _Optional[int] = ..., requests: _Optional[int] = ..., drafts_proposed: _Optional[int] = ..., drafts_verified: _Optional[int] = ..., drafts_accepted: _Optional[int] = ..., spec_steps: _Optional[int] = ..., compiles: _Optional[int] = ..., compiles_after_ready: _Optional[int] = ..., compile_seconds: _Optional[float] = ..., host_syncs: _Optional[int] = ..., verified_at_depth: _Optional[_Iterable[int]] = ..., accepted_at_depth: _Optional[_Iterable[int]] = ..., host_cpu_seconds: _Optional[float] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("request_id", "candidate", "slot", "state", "prompt_tokens", "prefilled_tokens", "output_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    candidate: int
    slot: int
    state: str
    prompt_tokens: int
    prefilled_tokens: int
    output_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., candidate: _Optional[int] = ..., slot: _Optional[int] = ..., state: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("max_records",)
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    max_records: int
    def __init__(self, max_records: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("json_lines", "records_dropped")
    JSON_LINES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    json_lines: bytes
    records_dropped: int
    def __init__(self, json_lines: _Optional[bytes] = ..., records_dropped: _Optional[int] = ...) -> None: ...
