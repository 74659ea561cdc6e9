"""Images in bodies of requests: parts of OpenAI's messages, blocks of Anthropic's, and what becomes of them."""
