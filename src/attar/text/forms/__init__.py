"""Prompts in the forms that some models were trained for: a gap to be filled in, a document to be judged.

Each form knows its special tokens, and whether a tokenizer has them.
"""
