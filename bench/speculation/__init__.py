"""Speculative decoding, measured. Each program answers one question, and its docstring has the options:

    PYTHONPATH=bench python -m speculation.real MODEL --draft DRAFT       what do drafts gain on real texts?
    PYTHONPATH=bench python -m speculation.predicted MODEL --draft DRAFT  can that gain be predicted?
    PYTHONPATH=bench python -m speculation.replay MODEL                   what do steps of several rows gain, if so many
                                                                          drafts are right? In chains, or in trees

`runs.py` answers prompts and counts, `texts.py` has the prompts, `tables.py` what is printed, and `llama_server.py` the
program beside attar. Beside this package `drafts.py` compares drafts of every kind, and `train_drafts.py` trains them.
"""
