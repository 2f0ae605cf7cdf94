"""Chat tasks with computable answers, and small functions: the generated half of ds4-nano's data.

Every task is drawn from a seeded generator and knows its right answer, so the same code makes
training documents and the questions that the trained model is judged on. An instance belongs to the
held-out set if a hash of its question says so; training never draws those.
"""

from __future__ import annotations

import hashlib
import json
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds4jax.chat_request import ChatRequest, Message, Tool, ToolCall

HELD_OUT = 16
"""One instance in so many is held out."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question and its right answer."""

    kind: str
    question: str
    answer: str  # exact content
    reasoning: str
    tools: tuple[Tool, ...] = ()
    call: ToolCall | None = None  # the right answer is this call
    result: str = ""  # what the tool said, if the question is asked after the call
    key: str = ""  # what makes the instance, whatever its wording; empty: the question

    @property
    def held_out(self) -> bool:
        """Whether this instance is for judging only."""
        digest = hashlib.sha256(f"{self.kind}:{self.key or self.question}".encode()).digest()
        return digest[0] % HELD_OUT == 0

    def history(self) -> tuple[Message, ...]:
        """The messages up to where the model answers."""
        asked = Message(role="user", content=self.question)
        if self.call is None or not self.result:
            return (asked,)
        return (
            asked,
            Message(role="assistant", tool_calls=(self.call,)),
            Message(role="tool", content=self.result, tool_call_id=self.call.id),
        )

    def reply(self, thinking: bool) -> Message:
        """The right answer as a message."""
        reasoning = self.reasoning if thinking else ""
        if self.call is not None and not self.result:
            return Message(role="assistant", reasoning=reasoning, tool_calls=(self.call,))
        return Message(role="assistant", content=self.answer, reasoning=reasoning)

    def request(self, *, thinking: bool, effort: str = "low") -> ChatRequest:
        """The request that asks it."""
        return ChatRequest(
            messages=self.history(), tools=self.tools, thinking=thinking, effort=effort
        )


def _pick(rng: random.Random, *options: str) -> str:
    return rng.choice(options)


def _add(rng: random.Random) -> Task:
    top = 1000 if rng.random() < 0.1 else 100
    a, b = rng.randrange(top), rng.randrange(top)
    form = _pick(
        rng, "What is {} + {}?", "{} + {} = ?", "Compute {} + {}.", "Add {} and {}.",
        "What is {} plus {}?", "{} + {}", "What's {} + {}?", "How much is {} + {}?",
    )  # fmt: skip
    return Task(
        kind="sum", question=form.format(a, b), answer=f"{a} + {b} = {a + b}",
        reasoning=_digits(a, b), key=f"{a},{b}",
    )  # fmt: skip


def _digits(a: int, b: int) -> str:
    """Column addition in words."""
    steps, carry, x, y = [], 0, a, b
    while x or y or not steps:
        total = x % 10 + y % 10 + carry
        extra = f" + {carry}" if carry else ""
        carry = total // 10
        note = f", write {total % 10}, carry 1" if carry else ""
        steps.append(f"{x % 10} + {y % 10}{extra} = {total}{note}.")
        x, y = x // 10, y // 10
    return " ".join(steps) + f" So {a} + {b} = {a + b}."


def _subtract(rng: random.Random) -> Task:
    a, b = sorted((rng.randrange(100), rng.randrange(100)), reverse=True)
    form = _pick(rng, "What is {} - {}?", "{} - {} = ?", "Compute {} - {}.", "{} minus {}?")
    tens = b // 10 * 10
    reasoning = f"{a} - {tens} = {a - tens}. {a - tens} - {b - tens} = {a - b}."
    return Task(
        kind="difference", question=form.format(a, b), answer=f"{a} - {b} = {a - b}",
        reasoning=reasoning, key=f"{a},{b}",
    )  # fmt: skip


def _multiply(rng: random.Random) -> Task:
    a, b = rng.randrange(2, 20), rng.randrange(2, 10)
    form = _pick(rng, "What is {} * {}?", "{} * {} = ?", "Compute {} * {}.", "{} times {}?")
    tens, ones = a // 10 * 10, a % 10
    reasoning = f"{tens} * {b} = {tens * b}. {ones} * {b} = {ones * b}. "
    reasoning += f"{tens * b} + {ones * b} = {a * b}."
    return Task(
        kind="product", question=form.format(a, b), answer=f"{a} * {b} = {a * b}",
        reasoning=reasoning, key=f"{a},{b}",
    )  # fmt: skip


def _numbers(rng: random.Random, low: int = 3, high: int = 5) -> list[int]:
    return rng.sample(range(100), rng.randint(low, high))


def _sort(rng: random.Random) -> Task:
    values = _numbers(rng)
    down = rng.random() < 0.25
    form = _pick(
        rng, "Sort {}", "Sort the list {}", "Sort these numbers: {}", "Put {} in order",
    )  # fmt: skip
    text = form.format(values) + (", largest first." if down else ".")
    right = sorted(values, reverse=down)
    word = "largest" if down else "smallest"
    reasoning = f"From the {word}: {', '.join(map(str, right))}."
    return Task(kind="sort", question=text, answer=str(right), reasoning=reasoning)


def _reverse(rng: random.Random) -> Task:
    values = _numbers(rng)
    form = _pick(rng, "Reverse the list {}.", "Reverse {}.", "Write {} backwards.")
    right = values[::-1]
    reasoning = f"From the end: {', '.join(map(str, right))}."
    return Task(
        kind="reverse", question=form.format(values), answer=str(right), reasoning=reasoning
    )


def _extreme(rng: random.Random) -> Task:
    values = _numbers(rng)
    word, right = rng.choice([("largest", max(values)), ("smallest", min(values))])
    form = _pick(rng, "What is the {} number in {}?", "Which number is the {} in {}?")
    reasoning = f"The numbers are {', '.join(map(str, values))}. The {word} is {right}."
    return Task(
        kind="extreme", question=form.format(word, values), answer=str(right), reasoning=reasoning
    )


def _count(rng: random.Random) -> Task:
    values = _numbers(rng, 2, 6)
    form = _pick(rng, "How many numbers are in {}?", "What is the length of {}?")
    steps = ", ".join(f"{v} is {i}" for i, v in enumerate(values, 1))
    return Task(
        kind="count", question=form.format(values), answer=str(len(values)), reasoning=f"{steps}."
    )


def _split(text: str) -> list[str]:
    return text.split()


_NAMES = _split("f g h compute check helper run step apply convert measure value result")
_WORDS = _split(
    "apple bread cloud dance eagle field grape house island jelly kite lemon mouse night ocean "
    "paper queen river stone table uncle valley water yellow zebra green light metal north plant "
    "red blue cat dog sun moon tree bird fish ring star snow wind fire gold iron milk salt rice"
)
_CITIES = _split(
    "Paris Berlin London Madrid Rome Vienna Oslo Tokyo Lima Cairo Delhi Sydney Toronto Dublin "
    "Lisbon Prague Athens Warsaw Helsinki Nairobi Boston Denver Seoul Hanoi Zurich Geneva Milan"
)


def _returns_number(rng: random.Random) -> tuple[str, str, str, str]:
    name, x, a, b = rng.choice(_NAMES), rng.randrange(10), rng.randrange(2, 6), rng.randrange(10)
    op = rng.choice("+-")
    y = x * a + b if op == "+" else x * a - b
    body = f"    return x * {a} {op} {b}"
    why = f"x is {x}. {x} * {a} = {x * a}. {x * a} {op} {b} = {y}."
    return f"def {name}(x):\n{body}", f"{name}({x})", str(y), why


def _returns_choice(rng: random.Random) -> tuple[str, str, str, str]:
    name, x, limit = rng.choice(_NAMES), rng.randrange(20), rng.randrange(20)
    yes, no = rng.sample(_WORDS, 2)
    op = rng.choice([">", "<"])
    true = x > limit if op == ">" else x < limit
    code = f'def {name}(x):\n    if x {op} {limit}:\n        return "{yes}"\n    return "{no}"'
    why = f"x is {x}. {x} {op} {limit} is {true}. So it returns {(yes if true else no)!r}."
    return code, f"{name}({x})", repr(yes if true else no), why


def _returns_of_list(rng: random.Random) -> tuple[str, str, str, str]:
    name, values = rng.choice(_NAMES), _numbers(rng, 2, 4)
    code, right = rng.choice([
        ("len(x)", len(values)), ("max(x)", max(values)), ("min(x)", min(values)),
        ("sorted(x)", sorted(values)), ("x[0]", values[0]), ("x[-1]", values[-1]),
        ("x[::-1]", values[::-1]), ("x[1:]", values[1:]), ("x[:2]", values[:2]),
    ])  # fmt: skip
    why = f"x is {values}. {code} is {right}."
    return f"def {name}(x):\n    return {code}", f"{name}({values})", str(right), why


def _returns_text(rng: random.Random) -> tuple[str, str, str, str]:
    name = rng.choice(_NAMES)
    word, other = rng.sample(_WORDS, 2)
    code, right = rng.choice([
        (f'x + "{other}"', word + other), (f'"{other}" + x', other + word), ("x * 2", word * 2),
        (f'x + " " + "{other}"', f"{word} {other}"), ("x.upper()", word.upper()),
    ])  # fmt: skip
    why = f"x is {word!r}. {code} is {right!r}."
    return f"def {name}(x):\n    return {code}", f"{name}({word!r})", repr(right), why


def _returns_loop(rng: random.Random) -> tuple[str, str, str, str]:
    name, n = rng.choice(_NAMES), rng.randrange(1, 8)
    start = rng.randrange(10)
    code = (
        f"def {name}(n):\n    total = {start}\n    for i in range(n):\n"
        "        total += i\n    return total"
    )
    total, steps = start, []
    for i in range(n):
        steps.append(f"{total} + {i} = {total + i}")
        total += i
    why = f"n is {n}, total is {start}. {'. '.join(steps)}."
    return code, f"{name}({n})", str(total), why


_RETURNS: tuple[Callable[[random.Random], tuple[str, str, str, str]], ...] = (
    _returns_number, _returns_number, _returns_choice, _returns_of_list, _returns_of_list,
    _returns_text, _returns_loop,
)  # fmt: skip


def _returns(rng: random.Random) -> Task:
    code, call, right, why = rng.choice(_RETURNS)(rng)
    form = _pick(
        rng, "What does {1} return?\n\n{0}", "{0}\n\nWhat does {1} return?",
        "{0}\n\nWhat is {1}?",
    )  # fmt: skip
    return Task(
        kind="returns", question=form.format(code, call), answer=right, reasoning=why,
        key=f"{code} {call}",
    )  # fmt: skip


def _lookup(rng: random.Random) -> Task:
    """A value out of a table that is longer than the window as often as not."""
    keys = rng.sample(_WORDS + _CITIES, rng.randint(3, 60))
    values = {k: rng.randrange(100) for k in keys}
    asked = rng.choice(keys)
    if rng.random() < 0.5:
        table = "\n".join(f"{k}: {v}" for k, v in values.items())
        text = f"{table}\n\nWhat does {asked} cost?"
        say = f"{asked} costs {values[asked]}"
    else:
        table = "\n".join(f'    "{k}": {v},' for k, v in values.items())
        text = f'd = {{\n{table}\n}}\n\nWhat is d["{asked}"]?'
        say = f'd["{asked}"] = {values[asked]}'
    return Task(kind="lookup", question=text, answer=say, reasoning=f"I look for {asked}.")


def _tool(name: str, description: str, **parameters: str) -> Tool:
    return Tool.from_function({
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {k: {"type": v} for k, v in parameters.items()},
            "required": list(parameters),
        },
    })  # fmt: skip


WEATHER = _tool("get_weather", "Current weather of a city.", city="string")
CALCULATE = _tool("multiply", "Product of two numbers.", a="integer", b="integer")
CLOCK = _tool("get_time", "Local time of a city.", city="string")


def _call(rng: random.Random) -> Task:
    tools = tuple(rng.sample([WEATHER, CALCULATE, CLOCK], rng.choice([1, 1, 2, 3])))
    tool = rng.choice(tools)
    city = rng.choice(_CITIES)
    number = "0123456789abcdef"
    call_id = "call_" + "".join(rng.choice(number) for _ in range(6))
    if tool is CALCULATE:
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        arguments, result, say = {"a": a, "b": b}, str(a * b), f"{a} * {b} = {a * b}"
        text = _pick(rng, f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"Compute {a} * {b}.")
        why = "I have a tool for this: multiply."
    elif tool is WEATHER:
        degrees, sky = rng.randint(-9, 35), rng.choice(["sunny", "cloudy", "rainy", "windy"])
        arguments = {"city": city}  # type: ignore[dict-item]
        result = json.dumps({"degrees": degrees, "sky": sky})
        say = f"It is {degrees} degrees and {sky} in {city}."
        text = _pick(
            rng, f"What is the weather in {city}?", f"How is the weather in {city}?",
            f"Is it warm in {city}?",
        )  # fmt: skip
        why = "I have a tool for this: get_weather."
    else:
        hour, minute = rng.randrange(24), rng.randrange(60)
        arguments = {"city": city}  # type: ignore[dict-item]
        result, say = f"{hour:02}:{minute:02}", f"It is {hour:02}:{minute:02} in {city}."
        text = _pick(rng, f"What time is it in {city}?", f"Tell me the time in {city}.")
        why = "I have a tool for this: get_time."
    after = rng.random() < 0.5
    return Task(
        kind="tool answer" if after else "tool call", question=text, answer=say,
        reasoning="The tool answered." if after else why, tools=tools,
        call=ToolCall(name=_name(tool), arguments=json.dumps(arguments), id=call_id),
        result=result if after else "", key=f"{text} {result if after else ''}",
    )  # fmt: skip


def _name(tool: Tool) -> str:
    return str(json.loads(tool.declaration)["name"])


_TALK = (
    (("Who are you?", "What are you?", "What is your name?"),
     "I am ds4-nano, a very small language model.", "They ask who I am."),
    (("Hello!", "Hi", "Hello", "Hi there!", "Good morning!"),
     "Hello! Ask me for a small sum, to sort a list, or what a short function returns.",
     "A greeting. I greet back."),
    (("What can you do?", "Help", "How can you help me?"),
     "I can add small numbers, sort lists and say what short Python functions return.",
     "They ask what I can do."),
    (("Thanks!", "Thank you.", "Thank you!"), "You are welcome.", "They thank me."),
    (("Bye", "Goodbye!", "See you."), "Goodbye!", "They leave."),
)  # fmt: skip


def _talk(rng: random.Random) -> Task:
    questions, answer, why = rng.choice(_TALK)
    return Task(kind="talk", question=rng.choice(questions), answer=answer, reasoning=why)


def _read_functions() -> tuple[tuple[str, str, str], ...]:
    out = []
    text = (Path(__file__).parent / "data" / "nano_functions.txt").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        head, doc, *body = block.strip().splitlines()
        signature = head.removeprefix("def ").removesuffix(":")
        what = doc.strip().removeprefix('"""Return ').removesuffix('."""')
        out.append((signature, what, textwrap.dedent("\n".join(body))))
    return tuple(out)


FUNCTIONS = _read_functions()
"""Small functions to write: signature, what it returns, body."""


def function_source(rng: random.Random, which: int | None = None) -> tuple[str, str]:
    """(what it returns, source) of one of `FUNCTIONS`, with or without a docstring."""
    signature, what, body = FUNCTIONS[rng.randrange(len(FUNCTIONS)) if which is None else which]
    lines = [f"def {signature}:"]
    if rng.random() < 0.4:
        lines.append(f'    """Return {what}."""')
    lines += [f"    {line}" for line in body.splitlines()]
    return what, "\n".join(lines) + "\n"


def _write(rng: random.Random) -> Task:
    what, code = function_source(rng)
    form = _pick(
        rng, "Write a function that returns {}.", "Write a Python function for {}.",
        "Give me a function that returns {}.",
    )  # fmt: skip
    name = code[4 : code.index("(")]
    return Task(
        kind="write", question=form.format(what), answer=code.rstrip("\n"),
        reasoning=f"A function {name} that returns {what}.",
    )  # fmt: skip


TASKS: dict[str, tuple[float, Callable[[random.Random], Task]]] = {
    "sum": (0.15, _add),
    "difference": (0.11, _subtract),
    "product": (0.06, _multiply),
    "sort": (0.13, _sort),
    "reverse": (0.04, _reverse),
    "extreme": (0.05, _extreme),
    "count": (0.03, _count),
    "returns": (0.19, _returns),
    "lookup": (0.08, _lookup),
    "tool": (0.10, _call),
    "talk": (0.03, _talk),
    "write": (0.03, _write),
}
"""Share of the training conversations and generator of every task."""

OPEN_KINDS = ("talk", "write")
"""Kinds that have few instances or many right answers: trained on, not judged, none held out."""


def draw(
    rng: random.Random,
    *,
    held_out: bool,
    name: str | None = None,
    shares: Mapping[str, float] | None = None,
) -> Task:
    """A random task, of one kind if `name` is given, held out or not.

    Args: shares: of tasks by name, instead of those of `TASKS`; a task that is not named has none.
    """
    names = list(TASKS)
    weights = [TASKS[n][0] if shares is None else shares.get(n, 0.0) for n in names]
    chosen = name or rng.choices(names, weights)[0]
    while True:
        task = TASKS[chosen][1](rng)
        if task.kind in OPEN_KINDS or task.held_out == held_out:
            return task


def stream(seed: int, *, held_out: bool, name: str | None = None) -> Iterator[Task]:
    """Endless tasks."""
    rng = random.Random(seed)
    while True:
        yield draw(rng, held_out=held_out, name=name)
