"""HTML pages that the server itself offers: `chat.html`, a chat with the served model.

A page loads nothing from elsewhere. No module of attar is imported here; `api/status.py` serves the page with its
content security policy.
"""
