"""Rules of the OpenAPI document about images: who may send them, in which form, and that a model without vision has
none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_PARTS = ("ImagePart", "ImageBlock", "InputImage")
_WITHIN = ("ImageUrl", "Base64Source")  # parts of those
_OLLAMA = ("OllamaMessage", "OllamaGenerateBody")  # whose images are a field beside the text
_URL = r"^data:image/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$"
_MESSAGES = {"Message": "image_url", "AnthropicMessage": "image", "MessageItem": "input_image"}
"""Messages by the type of their images."""


def describe_images(schemas: Schema, takes_images: bool) -> None:
    """Add to `schemas`, components by name, what holds of images; take images out where the model takes none."""
    if not takes_images:
        for found in list(_unions(schemas)):
            found["anyOf"] = [each for each in found["anyOf"] if _name(each) not in _PARTS]
            mapping = found.get("discriminator", {}).get("mapping", {})
            for tag in [tag for tag, reference in mapping.items() if reference.rpartition("/")[2] in _PARTS]:
                del mapping[tag]
        for name in (*_PARTS, *_WITHIN):
            schemas.pop(name, None)
        for name in _OLLAMA:
            schemas[name]["properties"]["images"] = {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
        return
    for name, field in (("ImagePart", "image_url"), ("InputImage", "image_url"), ("ImageUrl", "url")):
        described = schemas[name]["properties"][field]
        for each in [described, *described.get("anyOf", ())]:
            if each.get("type") == "string":
                each["pattern"] = _URL
    for name, kind in _MESSAGES.items():
        unseen = {"type": "array", "items": {"properties": {"type": {"not": {"const": kind}}}}}
        others = {"properties": {"content": {"anyOf": [{"type": ["string", "null"]}, unseen]}}}
        schemas[name]["not"] = {"not": {"anyOf": [{"properties": {"role": {"const": "user"}}}, others]}}
    user = {"properties": {"role": {"const": "user"}}}
    schemas["OllamaMessage"]["not"] = {"not": {"anyOf": [user, {"properties": {"images": {"maxItems": 0}}}]}}


def _unions(found: object) -> Iterator[Schema]:
    """Yield every schema within `found` that is one of several."""
    if isinstance(found, dict):
        if isinstance(found.get("anyOf"), list):
            yield found
        for each in found.values():
            yield from _unions(each)
    elif isinstance(found, list):
        for each in found:
            yield from _unions(each)


def _name(schema: object) -> str:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return reference.rpartition("/")[2] if isinstance(reference, str) else ""
