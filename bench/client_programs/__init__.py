"""The programs of `bench/clients.py`, one a client, and the locks of their environments."""
