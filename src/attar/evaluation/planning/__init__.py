"""What a plan by goals needs of this machine and of files: measured rates, a model's shape, and receipts of outputs.

`machine_rates` measures, `questions` reads and asks. The arithmetic itself is torch-free, in `attar.plan`.
"""
