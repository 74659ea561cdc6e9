"""The shapes of answers, for the OpenAPI document, and for tests to parse answers by.

The server writes dictionaries and bytes: streams encode what is constant in them once (`openai.py` beside this
package). These types describe the output; an answer has no field that they do not name.
"""
