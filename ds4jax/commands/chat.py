"""`ds4jax chat`: a conversation in the terminal, on this machine.

`Session` holds the conversation and asks the model; `_Shell` reads lines, shows answers and obeys
the slash commands. Every turn is rendered and prefilled as a whole.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ds4jax.commands import common, generate, interrupts, running

if TYPE_CHECKING:
    from ds4jax.chat_request import Message, Profile
    from ds4jax.config import SamplingParams, StoppingCriteria
    from ds4jax.local import Generation, LocalModel

Effort = Literal["low", "high", "max", "none"]

HELP = """\
/think  /think-max  /nothink   how much to think before the next answers
/ctx [TOKENS]                  show the context and how much of it is used, or change it
/read FILE                     send a text file as a message
/save FILE                     write the conversation as JSON, for generate --chat
/new                           forget the conversation
/quit                          leave (so does the end of the input)
Ctrl-C stops an answer; what it said so far stays in the conversation. Three times: the program."""


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "chat",
        help="a conversation in the terminal",
        description="Talk to the model. One line is one message; answers go to stdout, reasoning"
        " and notes to stderr. Commands: /think, /think-max, /nothink, /ctx [TOKENS], /read FILE,"
        " /save FILE, /new, /help, /quit. Ctrl-C stops an answer.",
    )
    common.add_model(parser)
    parser.add_argument("-sys", "--system", metavar="TEXT", help="system message")
    common.add_context(parser, "4096, or what the model allows")
    common.add_sampling(parser)
    common.add_runtime(parser)
    common.add_server(parser)
    common.add_output(parser, json=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    common.check_server_flags(args)
    sampling, stopping = running.sampling_of(args), running.stopping_of(args)
    if args.server is not None:
        from ds4jax.commands import remote

        return _Shell(args, remote.RemoteSession(args, sampling, stopping)).loop()
    model = running.open_model(args)
    model.need_tokenizer()
    size = model.file.model_config.vocab_size
    running.check_ids([i for i, _ in sampling.logit_bias], size, "--logit-bias")
    running.check_ids(stopping.stop_token_ids, size, "--stop-id")
    profile = running.chat_profile(args, model)
    session = Session(args, model, profile, sampling, stopping)
    session.start(running.context_of(args, model))
    return _Shell(args, session).loop()


class Session:
    """A conversation with a model in this process."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: running.Opened,
        profile: Profile,
        sampling: SamplingParams,
        stopping: StoppingCriteria,
    ) -> None:
        self.effort: Effort = args.effort or "high"
        self.messages: list[Message] = []
        self.ctx = 0
        self.used = 0  # tokens of the last prompt and its answer
        self.local: LocalModel | None = None
        self._args = args
        self._model = model
        self._profile = profile
        self._sampling = sampling
        self._stopping = stopping
        self.reset()

    @property
    def most(self) -> int:
        """Tokens that the model allows."""
        return self._model.file.model_config.max_position_embeddings

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        from ds4jax.chat_request import Message

        system = self._args.system
        self.messages = [] if system is None else [Message(role="system", content=system)]
        self.used = 0

    def start(self, ctx: int) -> None:
        """Load (the first time) and make the state for `ctx` tokens."""
        from ds4jax import local

        with running.progress(self._args) as shown:
            if self.local is None:
                loaded = running.load(self._args, self._model, ctx, shown)
            else:
                loaded = local.with_context(self.local.loaded, self._model.file, ctx)
                self.local.close()
            self.local = running.start(loaded, self._model, shown)
        self.ctx = ctx

    def ask(self, text: str) -> Generation:
        """A turn of the user and the answer to it, to be iterated; `keep` it afterwards.

        Raises:
            Failure: it does not fit the context; the conversation is as before.
        """
        from ds4jax import chat
        from ds4jax.answer import chat_prompt
        from ds4jax.chat_request import ChatError, ChatRequest, Message
        from ds4jax.tokenizer import TokenizerError

        assert self.local is not None
        turn = [*self.messages, Message(role="user", content=text)]
        request = ChatRequest(messages=tuple(turn), effort=self.effort)
        try:
            rendered = chat.render(request, self._profile)
            prompt = chat_prompt(rendered, self._model.need_tokenizer())
        except (ChatError, TokenizerError) as error:
            raise common.Failure(f"the message: {error}") from None
        least = self._stopping.min_output_tokens or 1
        if len(prompt.ids) + (self._stopping.max_output_tokens or least) > self.ctx:
            raise common.Failure(
                f"the conversation has {len(prompt.ids)} tokens with this message, over the context"
                f" of {self.ctx}: /new starts afresh, /ctx TOKENS makes room (at most {self.most})"
            )
        generation = self.local.generate(prompt, self._sampling, self._stopping)
        self.messages = turn
        self.used = len(prompt.ids)
        return generation

    def keep(self, generation: Generation) -> None:
        """Take the answer into the conversation, as far as it came."""
        from ds4jax.chat_request import Message

        result = generation.partial()
        self.used += len(result.ids)
        if result.parsed is not None:
            said = result.parsed
            self.messages.append(
                Message(role="assistant", content=said.content, reasoning=said.reasoning)
            )

    def summary(self, generation: Generation, prompt: int) -> str:
        """One line of figures about an answer to `prompt` tokens."""
        assert self.local is not None
        return generate.summary(generation, self.local, prompt)

    def as_json(self) -> list[dict[str, str]]:
        """The messages, as in OpenAI requests."""
        out = []
        for m in self.messages:
            item = {"role": m.role, "content": m.content}
            if m.reasoning:
                item["reasoning_content"] = m.reasoning
            out.append(item)
        return out


class _Shell:
    """Lines in, answers out."""

    def __init__(self, args: argparse.Namespace, session: Session) -> None:
        self._args = args
        self._session = session
        self._typed = common.stdin_is_terminal()
        self._interrupts = interrupts.Interrupts()
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text: the encoder says so
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if self._typed:
            with contextlib.suppress(ImportError):  # line editing, where Python has it
                import readline  # noqa: F401

    def loop(self) -> int:
        """Until the end of the input or /quit."""
        with self._interrupts:
            return self._loop()

    def _loop(self) -> int:
        from ds4jax.request import ServiceError

        self._note("type a message, or /help")
        while (line := self._read()) is not None:
            text = line.strip()
            if not text:
                continue
            try:
                if not text.startswith("/"):
                    self._answer(text)
                elif not self._command(text):
                    break
            except (common.Failure, ServiceError) as error:
                print(f"error: {error}", file=sys.stderr)
        return 0

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        while True:
            try:
                if self._typed:
                    return self._interrupts.read(lambda: input("> "))
                line = self._interrupts.read(sys.stdin.readline)
                if any("\udc80" <= c <= "\udcff" for c in line):
                    print("error: a line is not UTF-8 and is left out", file=sys.stderr)
                    continue
                return line if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)

    def _note(self, text: str) -> None:
        common.note(self._args, text)

    # ---- one turn ------------------------------------------------------------------------------

    def _answer(self, text: str) -> None:
        from ds4jax import parser

        session = self._session
        generation = session.ask(text)
        dim, shown = generate.Dim(), ""
        with self._interrupts.answering(generation) as was_interrupted:
            for output in generation:
                for event in output.events:
                    if isinstance(event, parser.Reasoning):
                        dim.write(event.text)
                    elif isinstance(event, parser.Content):
                        dim.close()
                        running.write_out(event.text)
                        shown = event.text
        dim.close()
        if not shown.endswith("\n"):
            running.write_out("\n")
        session.keep(generation)
        if was_interrupted():
            self._note("[interrupted]")
        answer = len(generation.partial().ids)
        line = session.summary(generation, session.used - answer)
        self._note(f"{line}; context {session.used} of {session.ctx}")

    # ---- commands ------------------------------------------------------------------------------

    def _command(self, text: str) -> bool:
        """Obey; False to leave."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        session = self._session
        efforts: dict[str, Effort] = {"/think": "high", "/think-max": "max", "/nothink": "none"}
        if rest and name in {*efforts, "/quit", "/exit", "/new", "/help"}:
            raise common.Failure(f"{name} takes nothing after it")
        if name in ("/quit", "/exit"):
            return False
        if name in efforts:
            session.effort = efforts[name]
            self._note(f"thinking: {session.effort}")
        elif name == "/new":
            session.reset()
            self._note("a new conversation")
        elif name == "/help":
            print(HELP, file=sys.stderr)
        elif name == "/ctx":
            self._context(rest)
        elif name == "/read":
            if not rest:
                raise common.Failure("/read needs a file: /read FILE")
            self._answer(self._file(rest))
        elif name == "/save":
            self._save(rest)
        else:
            raise common.Failure(f"no command {name}; /help lists them")
        return True

    def _file(self, name: str) -> str:
        try:  # it may be a pipe that nobody writes to
            return self._interrupts.read(lambda: common.read_text(name, "/read", bom=False))
        except KeyboardInterrupt:
            raise common.Failure(f"/read {name}: interrupted") from None

    def _context(self, text: str) -> None:
        session = self._session
        if text:
            try:
                wanted = common.integer(1, session.most, "tokens")(text)
            except argparse.ArgumentTypeError as error:
                raise common.Failure(f"/ctx {error}") from None
            with self._interrupts.working():
                session.start(wanted)
        print(f"context: {session.used} of {session.ctx} tokens used", file=sys.stderr)

    def _save(self, name: str) -> None:
        if not name:
            raise common.Failure("/save needs a file: /save FILE")
        data = json.dumps({"messages": self._session.as_json()}, ensure_ascii=False, indent=1)
        try:
            Path(name).write_text(data + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise common.Failure(f"/save {name}: {reason}") from None
        self._note(f"{len(self._session.messages)} messages in {name}")
