"""HTML pages that the server itself offers: `chat.py` has the page and its content security policy.

The pages load nothing from elsewhere. No module of attar is imported, and the files are package data.
"""
