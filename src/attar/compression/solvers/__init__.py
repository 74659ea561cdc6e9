"""The methods of compression: each a statistic and a solve, on tensors alone."""
