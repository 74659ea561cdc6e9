"""A conversation through the model's own chat template. The embedded model is no assistant: it only shows the calls."""

import attar
from attar import SamplingParams

llm = attar.LLM("demo")
messages = [{"role": "user", "content": "Tell me about the sea."}]
for question in ("And the ship?", None):
    answer = ""
    for piece in llm.stream_chat(messages, SamplingParams(max_tokens=24, temperature=0.7, seed=1)):
        answer += piece
    messages.append({"role": "assistant", "content": answer})
    if question is not None:
        messages.append({"role": "user", "content": question})
for message in messages:
    print(f"{message['role']:>9}: {message['content']}")
