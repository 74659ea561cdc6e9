"""Images from files and requests: decoded in a limited process, resized, and placed in a prompt.

Start reading in `decoding`. `settings` reads a checkpoint's preprocessor_config.json, `geometry` computes sizes,
`_decode_child` is the process that touches untrusted bytes, and `placeholders` expands a rendered prompt. The package
imports no torch, and Pillow only in that process.
"""
