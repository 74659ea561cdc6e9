"""Tasks with right answers: EleutherAI's lm-evaluation-harness asks, a decoder of attar's answers."""
