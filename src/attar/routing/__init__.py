"""The choice of an engine for each request, where several serve the same model: pure logic with its time as argument.

`prefixes.py` knows which engine has which cached block, `costs.py` what work takes, and `router.py` decides.

Imports: nothing of attar but the leaf modules. Start with `router.py`.
"""
