"""A server and a tool: the model asks for a function, this program runs it, and the model goes on with the result.

The embedded model is no assistant, so the call is required. Its name and arguments are kept to the schema by a grammar.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any


def weather(city: str) -> str:
    return f"12 degrees and rain in {city}"


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(server + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))  # type: ignore[no-any-return]


cities = {"type": "string", "enum": ["Oslo", "Lima"]}
schema = {"type": "object", "properties": {"city": cities}, "required": ["city"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    server = f"http://127.0.0.1:{free.getsockname()[1]}"
running = subprocess.Popen([sys.executable, "-m", "attar", "serve", "demo", "--port", server.rpartition(":")[2]])
try:
    for _ in range(600):  # a minute; /readyz answers 200 once the model is loaded
        try:
            urllib.request.urlopen(server + "/readyz")
            break
        except OSError:
            time.sleep(0.1)
    messages: list[Any] = [{"role": "user", "content": "The weather in Oslo?"}]
    settings = {"tools": tools, "parallel_tool_calls": False, "temperature": 0, "max_tokens": 96}
    said = post("/v1/chat/completions", {"messages": messages, "tool_choice": "required", **settings})
    call = said["choices"][0]["message"]["tool_calls"][0]
    result = weather(**json.loads(call["function"]["arguments"]))
    print(f"call:   {call['function']['name']}({call['function']['arguments']})\nresult: {result}")
    messages += [said["choices"][0]["message"], {"role": "tool", "tool_call_id": call["id"], "content": result}]
    said = post("/v1/chat/completions", {"messages": messages, **settings})
    print(f"answer: {said['choices'][0]['message']['content']!r}")
finally:
    running.terminate()
    running.wait()
