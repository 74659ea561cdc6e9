"""Training of draft heads and small draft models for a model that stays as it is.

`run.py` is the run: steps of Adam, saves, agreement on text that is held out, and the receipt. `target.py` is the model
drafted for, and `medusa.py` and its neighbours are what is trained, one kind a file. The engine reads what is written
here, and trains nothing.
"""
