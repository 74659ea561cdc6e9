"""A client of attar's HTTP process in a Ray cluster, and the texts that it must get."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams

SECONDS = 120.0
PROMPT = "Once upon a time there was a little fox"
BEGUN = 10  # events of a stream, after which it has begun
TOKENS = 200


class Client:
    """Asks the server at a port of loopback."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> Any:
        """Return a JSON document; None where the server does not answer with one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            found = reply.read()
        except OSError:
            return None
        finally:
            connection.close()
        return json.loads(found) if reply.status == 200 else None

    def ready(self) -> int:
        """Return how many replicas take requests."""
        told = self.get("/v1/engine")
        return 0 if told is None else sum(each["state"] == "ready" for each in told["replicas"])

    def ask(self, seed: int, begun: Callable[[], Any] = lambda: None, tokens: int = TOKENS) -> str:
        """Return a streamed answer. `begun` is called once some of it has come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        asked = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.9, "seed": seed}
        body = json.dumps(asked | {"stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        text = ""
        for count, line in enumerate(line for line in reply if line.startswith(b"data: {")):
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            if count == BEGUN:
                begun()
        connection.close()
        return text


def texts(*seeds: int, tokens: int = TOKENS) -> dict[int, str]:
    """Return the text of each seed, by an engine in this process."""
    llm = LLM("demo", verify=False)
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.9, seed=seed) for seed in seeds]
    return {seed: llm.generate(PROMPT, each)[0].text for seed, each in zip(seeds, params, strict=True)}
