"""One line per request, at its end. No prompt text unless the server was told to log it."""

from __future__ import annotations

import json
import logging
from typing import Any

from ds4jax_server.settings import ServerConfig

_LOG = logging.getLogger("ds4jax.request")


class RequestLog:
    """Writes the lines, as text or as JSON."""

    def __init__(self, config: ServerConfig) -> None:
        self._json = config.log_format == "json"
        self._prompts = config.log_prompts

    def write(self, request_id: str, code: str, run: Any, now: float) -> None:
        """Log one finished call (`run` is the service's record of it)."""
        call, outputs = run.call, run.outputs
        tokens = sum(o.tokens for o in outputs)
        firsts = [x for o in outputs if (x := o.answer.first_token_at) is not None]
        fields: dict[str, Any] = {
            "request_id": request_id,
            "code": code,
            "reason": run.reason,
            "prompt_tokens": len(call.prompt.ids) if call is not None else 0,
            "cached_tokens": 0,
            "output_tokens": tokens,
            "finish": ",".join(o.result.finish_reason for o in outputs if o.result),
            "queue_s": round(run.started.queue_s, 4) if run.started is not None else None,
            "ttft_s": round(min(firsts) - run.began, 4) if firsts else None,
            "tok_s": _rate(tokens, firsts, outputs),
            "total_s": round(now - run.began, 4),
        }
        if self._prompts and call is not None:
            fields["prompt"] = call.prompt_text
        if self._json:
            _LOG.info("%s", json.dumps(fields, ensure_ascii=False))
        else:
            _LOG.info("%s", " ".join(f"{k}={_text(v)}" for k, v in fields.items()))


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or "\n" in text else text


def _rate(tokens: int, firsts: list[float], outputs: Any) -> float | None:
    """Tokens per second after the first token."""
    if not firsts:
        return None
    span = max(o.answer.last_token_at or 0.0 for o in outputs) - min(firsts)
    return round((tokens - len(firsts)) / span, 2) if span > 0 else None
