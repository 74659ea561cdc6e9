"""Retrieval with a prefix cache: documents come first in a prompt, so the second question about one reuses its tokens.

Order decides: what many prompts share stands at their beginning, and what differs at their end.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request

DOCUMENTS = [
    "The lighthouse stands on the northern cliff. Its keeper lights the lamp at dusk and writes the weather down. " * 3,
    "The mill belongs to the baker. He grinds wheat on Mondays, and rye on the last Friday of each month. " * 3,
]
QUESTIONS = ["When is the lamp of the lighthouse lit?", "Who writes the weather down?", "When does he grind rye?"]


def best(question: str) -> str:
    """Return the document that shares the most words with a question; a real one would rank by embeddings."""
    words = set(question.lower().strip("?").split())
    return max(DOCUMENTS, key=lambda each: len(words & set(each.lower().replace(".", "").split())))


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
    for question in QUESTIONS:
        body = {"prompt": f"{best(question)}\nQuestion: {question}\nAnswer:", "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(f"{server}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        usage = json.load(urllib.request.urlopen(request))["usage"]
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{usage['prompt_tokens']:4} tokens of prompt, {reused:4} reused: {question}")
finally:
    running.terminate()
    running.wait()
