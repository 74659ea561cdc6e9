"""HTML pages that the server itself offers: a chat with the served model (`chat_page.py`), and the lab (`lab.py`).

A page loads nothing from elsewhere. `api/status.py` serves the chat with its content security policy.
"""
