"""The lab's page as the server gives it: without data, and with a policy that lets it ask this server for them."""

from __future__ import annotations

from attar.lab import facts, page

LAB = page.html(facts.facts(None, None, live=True), connects=True).encode()
POLICY = page.policy(connects=True)
"""The page's content security policy: it may run its own script, and connect to this server."""
