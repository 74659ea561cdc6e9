"""The request to compress a checkpoint, and its resolution against the model.

`request.py` holds pure values, and `resolve.py` checks them with one recipe before anything is computed. The package
imports `recipe`, `calibration`, `outputs` and `rotation`, never `runs`. Start with `request.py`.
"""
