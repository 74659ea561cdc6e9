"""HTML pages that the server itself offers: `chat.html`, a chat with the served model, and the lab (`lab.py`).

A page loads nothing from elsewhere. `api/status.py` serves the chat with its content security policy.
"""
