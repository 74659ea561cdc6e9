"""The lab: one self-contained page of simulators, driven by measured rates, a model's tensors and a server's state.

`formulas.py` has every formula; `page/formulas.js` repeats them for the page, and tests hold the two together.
"""
