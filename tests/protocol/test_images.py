import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.errors import UserError
from attar.protocol.framing import take
from attar.protocol.image_limits import MAX_IMAGES, MAX_PIXELS, MAX_REQUEST_PIXELS, MAX_TILE_BYTES
from attar.protocol.images import DIGEST, ImageInput, check_images, digest_of
from attar.protocol.messages import MAX_FRAME, Command, Submit, encode
from attar.protocol.request import SamplingParams

SIDE = 4


def make(count: int = 1, rows: int = 5, **changes: object) -> ImageInput:
    shape = (count, SIDE, SIDE)
    tiles = bytes(range(3 * SIDE * SIDE)) * count
    image = ImageInput(digest_of(b"s", shape, (9, 7), tiles), tiles, shape, (1, count), (9, 7), rows)
    return msgspec.structs.replace(image, **changes)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), max_size=MAX_IMAGES))
def test_images_pass_whole_through_a_frame_and_their_rows_are_counted(sizes: list[tuple[int, int]]) -> None:
    images = tuple(make(count, rows) for count, rows in sizes)
    tokens = sum(rows for _, rows in sizes)
    submit = Submit("a", (7,) * tokens, SamplingParams(), images=images)
    body = take(bytearray(encode([submit])))
    assert body is not None
    (read,) = msgspec.msgpack.decode(body, type=list[Command])
    assert read == submit
    check_images(read.images, tokens)
    for other in (tokens + 1, tokens - 1):
        with pytest.raises(UserError) as caught:
            check_images(read.images, other)
        assert caught.value.code == "image_invalid"


BAD: list[tuple[dict[str, object], str]] = [
    ({"tiles": b""}, "image_invalid"),
    ({"tiles": bytes(3 * SIDE * SIDE + 1)}, "image_invalid"),
    ({"digest": b"short"}, "image_invalid"),
    ({"shape": (0, SIDE, SIDE), "tiles": b""}, "image_invalid"),
    ({"shape": (-1, -SIDE, SIDE)}, "image_invalid"),
    ({"shape": (1 << 40, SIDE, SIDE)}, "image_invalid"),
    ({"grid": (-1, 1)}, "image_invalid"),
    ({"size": (0, 5)}, "image_invalid"),
    ({"rows": 0}, "image_invalid"),
    ({"size": (MAX_PIXELS + 1, 1)}, "image_too_large"),
]


@pytest.mark.parametrize("changes, code", BAD)
def test_an_image_that_contradicts_itself_is_refused(changes: dict[str, object], code: str) -> None:
    image = make(**changes)  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        check_images([image], image.rows)
    assert caught.value.code == code


def test_limits_of_a_request_are_named_and_end_where_they_say() -> None:
    half = make(size=(MAX_REQUEST_PIXELS // 4 // 2, 4), rows=1)
    check_images([half, half], 2)
    check_images([make(rows=1)] * MAX_IMAGES, MAX_IMAGES)
    for images in ([half, half, make(rows=1)], [make(rows=1)] * (MAX_IMAGES + 1)):
        with pytest.raises(UserError) as caught:
            check_images(images, len(images))
        assert caught.value.code == "image_too_large"
    assert str(MAX_IMAGES) in str(caught.value)


def test_the_largest_images_fit_into_a_frame_beside_a_long_prompt() -> None:
    assert MAX_TILE_BYTES + 2 * (4 << 20) < MAX_FRAME


def test_digests_depend_on_everything_that_features_depend_on() -> None:
    tiles, shape, size = bytes(48), (1, 4, 4), (9, 7)
    same = digest_of(b"s", shape, size, tiles)
    others = [
        digest_of(b"t", shape, size, tiles),
        digest_of(b"s", (2, 2, 4), size, tiles),
        digest_of(b"s", shape, (7, 9), tiles),
        digest_of(b"s", shape, size, b"\1" + tiles[1:]),
        digest_of(b"s" + tiles[:1], shape, size, tiles[1:]),
    ]
    assert len(same) == DIGEST
    assert len({same, *others}) == 1 + len(others)
