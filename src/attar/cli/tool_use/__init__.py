"""Tools of `attar chat`: functions of a Python file that the model may call, each call confirmed by the user.

`functions.py` reads and runs them in a child process, `_functions_child.py`. `conversation.py` has the turns.
"""
